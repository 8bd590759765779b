"""How a setting is declared and checked: one line of meaning, one sentence if wrong."""

import dataclasses


def setting(default, doc: str):
  """A setting: its default and one line on its meaning and unit."""
  return dataclasses.field(default=default, metadata={'doc': doc})


def want(ok: bool, name: str, got, need: str) -> None:
  if not ok:
    raise ValueError(f'{name}: got {got!r}, want {need}')


def at_least(settings, section: str, least: float, *names: str) -> None:
  for name in names:
    got = getattr(settings, name)
    want(got >= least, f'{section}{name}', got, f'>= {least}')


def above(settings, section: str, bound: float, *names: str) -> None:
  for name in names:
    got = getattr(settings, name)
    want(got > bound, f'{section}{name}', got, f'> {bound}')


def one_of(settings, section: str, name: str, *choices: str) -> None:
  got = getattr(settings, name)
  want(got in choices, f'{section}{name}', got, 'one of ' + ', '.join(choices))
