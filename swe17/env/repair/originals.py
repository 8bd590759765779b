"""Takes the function under repair out of a process that runs somebody's version of it.

    remove    the original is nowhere in this process any more
    install   what called the original calls the version

A version that could call the original, by importing the module again, by another name
of it, or through a helper that calls it, would pass every case and repair nothing. So
in the process that runs the version

  every reference to the original is dead: a Python function gets other code in place,
  wherever it is held; a builtin is taken out of all that refers to it;
  no builtin or frozen module can be made anew;
  (runner.py) no file can be opened, so none can be imported or read.

This file runs inside the sandbox and imports the standard library only.
"""

import gc
import sys
import types
from typing import Any

# What makes modules of the interpreter's own copies: C code, and frozen code objects.
_MAKERS = ('create_builtin', 'create_dynamic', 'get_frozen_object', 'init_frozen')


def remove(module: types.ModuleType, name: str) -> tuple[types.FunctionType, ...]:
  """Makes the original unreachable; the functions that `install` gives its version to.

  Nothing where the module has no such name: what it has under another is no original.
  """
  _close_makers()
  original = vars(module).pop(name, None)
  if original is None:
    return ()
  found = []
  layer: Any = original
  while layer is not None:
    if type(layer) is types.FunctionType:
      _become(layer, _gone)
      found.append(layer)
    layer = getattr(layer, '__wrapped__', None)
  if type(original) is not types.FunctionType:
    _forget(original)
  return tuple(found)


def install(
  module: types.ModuleType,
  name: str,
  functions: tuple[types.FunctionType, ...],
  version: Any,
) -> None:
  """Puts a version where the original was, and its code into what others still hold."""
  vars(module)[name] = version
  for function in functions:
    if type(version) is types.FunctionType and not version.__code__.co_freevars:
      _become(function, version)


def _gone(*_: Any, **__: Any) -> None:
  raise NameError('the function under repair')


def _become(function: types.FunctionType, other: types.FunctionType) -> None:
  """Gives a function the code and defaults of another, which has no free variables."""
  free = function.__code__.co_freevars  # a function must keep as many as it has
  function.__code__ = other.__code__.replace(co_freevars=free)
  function.__defaults__, function.__kwdefaults__ = (
    other.__defaults__,
    other.__kwdefaults__,
  )


def _forget(original: Any) -> None:
  """Takes an object out of every dict and list that holds it."""
  gc.unfreeze()  # what the zygote froze is not looked at otherwise
  for holder in gc.get_referrers(original):
    if type(holder) is dict:
      for key in [key for key, value in holder.items() if value is original]:
        holder[key] = _gone
    elif type(holder) is list:
      holder[:] = [_gone if value is original else value for value in holder]


def _close_makers() -> None:
  """Leaves nothing that gives a fresh copy of a builtin or frozen module."""
  makers = [vars(sys.modules['_imp']).get(name) for name in _MAKERS]
  for module in list(sys.modules.values()):
    names = vars(module) if isinstance(module, types.ModuleType) else {}
    for name in [n for n, value in names.items() if any(value is m for m in makers)]:
      if names[name] is not None:
        del names[name]
