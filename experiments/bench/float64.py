"""A float32 program run in float64: what rounding alone has done to its results.

The program is lowered as ever (StableHLO), its text is widened (every f32 type and
constant becomes f64) and compiled as it then stands. Nothing in the code has to know
of float64, and a cast to float32 in the middle of it is widened too. bfloat16 stays:
weights that are rounded to it are rounded here as well.
"""

from collections.abc import Callable
import re
from typing import Any

import jax
from jaxlib import xla_client
import numpy as np

_SCALAR = re.compile(r'dense<0x([0-9A-F]{8})> : tensor<((?:\d+x)*)f32>')
_ARRAY = re.compile(r'dense<"0x([0-9A-F]+)"> : tensor<((?:\d+x)*)f32>')
_DECIMALS = re.compile(r'dense<([^"x]+?)> : tensor<((?:\d+x)*)f32>')
_NUMBER = re.compile(r'-?\d+\.\d+(?:[eE][+-]?\d+)?')
_TYPE = re.compile(r'f32(?=[>,) ]|$)', re.MULTILINE)


def run(fn: Callable[..., Any], *args: Any) -> Any:
  """`fn(*args)` on one device, computed in float64; a tree of NumPy arrays.

  ValueError if the program holds what a change of types would break.
  """
  lowered = jax.jit(fn, keep_unused=True).lower(*args)
  client, device = jax.devices()[0].client, jax.devices()[:1]
  made = client.compile_and_load(
    widened(lowered.as_text()),
    xla_client.DeviceList(tuple(device)),
    xla_client.CompileOptions(),
  )
  with jax.enable_x64(True):
    given = [jax.device_put(_wide(x), device[0]) for x in jax.tree.leaves(args)]
    shards = made.execute_sharded(given).disassemble_into_single_device_arrays()
    leaves = [np.asarray(parts[0]) for parts in shards]
  return jax.tree.unflatten(jax.tree.structure(lowered.out_info), leaves)


def widened(text: str) -> str:
  """StableHLO text with float64 in the place of float32."""
  for word in ('bitcast_convert', 'custom_call', 'reduce_precision'):
    if f'stablehlo.{word}' in text:
      raise ValueError(f'widening a program: got {word}, which depends on the type')
  text = _SCALAR.sub(lambda m: f'dense<0x{_hex(m[1])}> : tensor<{m[2]}f64>', text)
  text = _ARRAY.sub(lambda m: f'dense<"0x{_bytes(m[1])}"> : tensor<{m[2]}f64>', text)
  text = _DECIMALS.sub(
    lambda m: f'dense<{_NUMBER.sub(_exact, m[1])}> : tensor<{m[2]}f64>', text
  )
  return _TYPE.sub('f64', text)


def _exact(number: re.Match[str]) -> str:
  """The float32 that a decimal stands for, in digits enough for float64."""
  return f'{float(np.float32(number[0])):.17e}'


def _hex(digits: str) -> str:
  """One number, as MLIR writes it: most significant byte first."""
  return np.frombuffer(bytes.fromhex(digits), '>f4').astype('>f8').tobytes().hex()


def _bytes(digits: str) -> str:
  """An array, as MLIR writes it: its bytes in memory."""
  return np.frombuffer(bytes.fromhex(digits), '<f4').astype('<f8').tobytes().hex()


def _wide(x: Any) -> np.ndarray:
  x = np.asarray(x)
  return x.astype(np.float64) if x.dtype == np.float32 else x
