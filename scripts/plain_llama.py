"""llama.cpp as the rival of scripts/bench.py serve: its Python package, without a server.

    PYTHON -P scripts/plain_llama.py FILE.gguf TOKENS THREADS

PYTHON has llama-cpp-python; with -P, it does not take scripts/tokenize.py for its own tokenize.
Prints a line of JSON after the first token, and one for one stream and for eight in one batch: CPU
seconds a token, greedy, end tokens ignored.
"""

import ctypes
import json
import resource
import sys
import time

import llama_cpp
import numpy as np

# bench.py's question, without the system message that the model's template adds.
PROMPT = "<|im_start|>user\nName three planets.<|im_end|>\n<|im_start|>assistant\n"
STREAMS = 8


def main() -> None:
    """Measures."""
    path, tokens, threads = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    llama_cpp.llama_backend_init()
    model = llama_cpp.llama_model_load_from_file(
        path.encode(), llama_cpp.llama_model_default_params()
    )
    params = llama_cpp.llama_context_default_params()
    params.n_ctx, params.n_seq_max = STREAMS * 512, STREAMS
    params.n_threads = params.n_threads_batch = threads
    context = llama_cpp.llama_init_from_model(model, params)
    vocab = llama_cpp.llama_model_get_vocab(model)
    ids = (llama_cpp.llama_token * 256)()
    text = PROMPT.encode()
    count = llama_cpp.llama_tokenize(vocab, text, len(text), ids, 256, False, True)
    width = llama_cpp.llama_vocab_n_tokens(vocab)
    batch = llama_cpp.llama_batch_init(512, 0, 1)

    def feed(pieces: list[tuple[int, int, int, bool]]) -> list[int]:
        """Decodes (token, position, stream, whether it is followed by a token to draw)."""
        batch.n_tokens = len(pieces)
        for i, (token, position, stream, draws) in enumerate(pieces):
            batch.token[i], batch.pos[i], batch.n_seq_id[i] = token, position, 1
            batch.seq_id[i][0], batch.logits[i] = stream, draws
        if llama_cpp.llama_decode(context, batch):
            raise SystemExit("llama_decode failed")
        tokens = []
        for i, piece in enumerate(pieces):
            if piece[3]:
                logits = llama_cpp.llama_get_logits_ith(context, i)
                address = ctypes.cast(logits, ctypes.POINTER(ctypes.c_float))
                tokens.append(int(np.ctypeslib.as_array(address, (width,)).argmax()))
        return tokens

    first = None
    for streams in (1, STREAMS):
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(context), True)
        new = []
        for stream in range(streams):
            new += feed([(ids[i], i, stream, i == count - 1) for i in range(count)])
            if first is None:
                first = {"first_cpu_s": time.process_time(), "prompt_tokens": count}
                print(json.dumps(first), flush=True)
        began = time.process_time()
        for step in range(tokens):
            new = feed([(token, count + step, i, True) for i, token in enumerate(new)])
        cpu = (time.process_time() - began) / tokens / streams
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        row = {"streams": streams, "cpu_s_a_token": cpu, "peak_mib": peak}
        print(json.dumps(row), flush=True)


main()
