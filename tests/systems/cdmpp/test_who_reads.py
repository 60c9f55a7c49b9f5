"""Who reads whose result in a compiled module, also from one turn of a loop to the next."""

import jax
import jax.numpy as jnp

from megajax.systems.cdmpp.profile import Reads

TEXT = """HloModule jit_f, is_scheduled=true

%body (state: (s32[], f32[8,8], f32[8,8])) -> (s32[], f32[8,8], f32[8,8]) {
  %state = (s32[], f32[8,8]{1,0}, f32[8,8]{1,0}) parameter(0)
  %turn = s32[] get-tuple-element(%state), index=0
  %y = f32[8,8]{1,0} get-tuple-element(%state), index=1
  %w = f32[8,8]{1,0} get-tuple-element(%state), index=2
  %dot = f32[8,8]{1,0} dot(%y, %w), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  %next = s32[] negate(%turn)
  %tanh = f32[8,8]{1,0} tanh(%dot)
  ROOT %left = (s32[], f32[8,8]{1,0}, f32[8,8]{1,0}) tuple(%next, %tanh, %w)
}

%condition (given: (s32[], f32[8,8], f32[8,8])) -> pred[] {
  %given = (s32[], f32[8,8]{1,0}, f32[8,8]{1,0}) parameter(0)
  %at = s32[] get-tuple-element(%given), index=0
  ROOT %less = pred[] compare(%at, %at), direction=LT
}

ENTRY %main (x: f32[8,8]) -> f32[8,8] {
  %x = f32[8,8]{1,0} parameter(0)
  %zero = s32[] constant(0)
  %sine = f32[8,8]{1,0} sine(%x)
  %weight = f32[8,8]{1,0} cosine(%x)
  %start = (s32[], f32[8,8]{1,0}, f32[8,8]{1,0}) tuple(%zero, %sine, %weight)
  %while = (s32[], f32[8,8]{1,0}, f32[8,8]{1,0}) while(%start), condition=%condition, body=%body
  %result = f32[8,8]{1,0} get-tuple-element(%while), index=1
  ROOT %add = f32[8,8]{1,0} add(%result, %x)
}
"""


def test_the_next_turn_reads_what_the_last_one_left():
    reads = Reads(TEXT)
    assert reads.containers == {"while"}
    assert reads.readers["dot"] == {"tanh"}
    assert reads.readers["tanh"] == {"dot", "add"}  # its own body, and what follows the loop
    assert reads.readers["sine"] == {"while", "dot", "add"}  # the loop may turn no time
    assert reads.readers["weight"] == {"while", "dot"}
    assert reads.readers["next"] == {"next", "less"}


def test_a_compiled_loop_is_understood():
    def looped(x, w):
        return jax.lax.fori_loop(0, 5, lambda _, y: jnp.tanh(y @ w), x).T + 1.0

    x = jnp.ones((96, 96))
    text = jax.jit(looped).lower(x, x).compile().as_text()
    reads = Reads(text)
    (loop,) = reads.containers
    (tanh,) = (
        name for name in reads.readers if "tanh" in name and reads.readers[name] & {loop} == set()
    )
    assert len(reads.readers[tanh]) == 2, reads.readers
