"""The stages as actors of a Ray cluster on this machine, which is one host."""

import dataclasses
import time

import pytest
from test_runtime import FEW, FLOAT32, SHORT, few, on_one_device, quantized

from megajax.systems.llm_pq import RayRuntime, StageError, cluster_devices, stages
from megajax.systems.llm_pq import runtime as runtime_


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # Ray's own
def test_actors_give_the_engines_tokens_and_a_dead_one_is_named():
    ray = pytest.importorskip("ray", reason="uv sync --extra ray")
    env = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
    actor = {"num_cpus": 0.1, "runtime_env": {"env_vars": env}}
    prompts, params, _ = few()
    params = [dataclasses.replace(p, seed=k) for k, p in enumerate(params)]
    expected = on_one_device(FEW, SHORT.bits, prompts, params)
    ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False)
    try:
        assert cluster_devices() == []  # it has no GPU
        weights = quantized(FEW, SHORT.bits)
        with RayRuntime(weights, FEW, SHORT, [actor] * 3, prefill_tokens=2, **FLOAT32) as runtime:
            assert runtime.generate(prompts, params) == expected
            ray.kill(runtime._stages[1]._actor)
            match = r"^stage 1 \(device 0, layers 1 to 2\) died: .*Actor"
            with pytest.raises(StageError, match=match):
                runtime.generate(prompts, params)
            runtime.restart()
            assert runtime.generate(prompts, params) == expected
        check_timeouts(ray)
    finally:
        ray.shutdown()


def check_timeouts(ray):
    """A TimeoutError of the stage's own program is its error; a wait that ends is another one."""

    class Stage:
        def call(self, method):
            if method == "check":
                raise TimeoutError("the disk took 30 s")
            time.sleep(60)

    stage = runtime_.RayStage.__new__(runtime_.RayStage)
    stage._ray, stage._actor = ray, ray.remote(Stage).options(num_cpus=0.1).remote()
    place = stages.Place(1, 0, 2, 3, True)
    for limit in (60.0, None):
        match = r"^stage 1 \(device 0, layer 2\) died: TimeoutError: the disk took 30 s;"
        with pytest.raises(StageError, match=match):
            runtime_.check([stage], [place], limit)
    with pytest.raises(stages.NoAnswerError):
        stage.wait(stage.send("sleep"), 0.5)
    stage.close()
