"""Train a coding agent: the program behind every role.

  python -m experiments.swe17 --config=experiments/configs/quickstart.py
      run the main job on this machine: a learner, samplers and a rollout process
  ... --config=experiments/configs/quickstart.py:no_replay
      the same with the config's argument `no_replay` (the config file lists them)
  ... --config.optim.lr=3e-4 --config.steps=20
      change any setting; `--helpfull` lists all of them with meaning and default
  ... --run_dir=runs/mine
      where the run folder goes (default: runs/<config>-<time>)
  ... --resume --run_dir=runs/mine
      go on with a run that was stopped or killed, with the settings it has

Ctrl-C stops every process within 5 seconds. Exit codes: 0 done, 1 a role kept dying,
2 bad input (one sentence on stderr says what), 130 Ctrl-C.

A role can be started alone in the folder of a run (--role=local does that for you):
--role=learner|sampler|rollout --run_dir=<folder>, samplers and rollouts with
--index=<i>. With mesh.processes above 1 learners have it too: start them together, on
machines that find --config.mesh.coordinator=host:port, again if one of them ends. With
relay.enabled, weights reach the samplers through --role=controller, one for a cluster,
and --role=relay --index=<i>, one for a host (swe17/sync/relay.py).
"""

from collections.abc import Sequence
import errno
import importlib
import json
import logging
import os
import sys
import traceback

from absl import flags

from experiments import options
from launch import folder, process
from swe17 import config, settings

_HELP = {'-h', '--help', '--helpshort', '--helpfull'}
_FULL_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)
_FULL_DISK_SAID = ('the disk is full', 'disk quota', 'read-only', 'No space left')


def main(argv: Sequence[str]) -> int:
  """Runs the command line `argv` (without the program's name) to its exit code."""
  asked = _HELP.intersection(argv)
  if asked:
    print(__doc__, _table() if '--helpfull' in asked else '', sep='\n')
    return 0
  try:
    chosen = options.parse(argv)
  except (ValueError, OSError, flags.Error) as e:
    return _refuse(_sentence(e))
  try:
    code = _local(chosen, argv) if chosen.role == 'local' else _role(chosen)
  except KeyboardInterrupt:
    code = 130
  if chosen.role == 'learner' and chosen.cfg.mesh.processes > 1:
    process.leave(code)
  return code


def _refuse(sentence: str) -> int:
  print(f'error: {sentence}', file=sys.stderr)
  return 2


def _local(chosen: options.Options, argv: Sequence[str]) -> int:
  """Starts and supervises every role on this machine."""
  cfg = chosen.cfg
  try:
    lock = folder.claim(cfg.run_dir, resume=chosen.resume)
  except (ValueError, OSError) as e:
    return _refuse(_sentence(e))
  try:
    command = ['python', '-m', 'experiments.swe17', *argv]
    folder.fill(cfg.run_dir, settings.to_json(cfg, chosen.origin), command)
    # Imported here: bad input is refused before anything slow is loaded.
    from launch import local

    return local.run(cfg, resume=chosen.resume)
  except OSError as e:
    said = _full_disk(e)
    if said is None:
      raise
    return _refuse(said)
  finally:
    os.close(lock)


def _role(chosen: options.Options) -> int:
  """Runs one role in this process, to its end.

  Exit code 1 asks for a restart (a fault of the machine, or one that may pass), 2 for
  none: a ValueError, or a disk that is full.
  """
  cfg = chosen.cfg
  if chosen.parent:
    process.end_with(chosen.parent)
  logging.basicConfig(
    level=logging.INFO,
    format='%(asctime)s %(levelname).1s %(name)s: %(message)s',
    datefmt='%H:%M:%S',
  )
  try:
    if chosen.role == 'rollout':
      return importlib.import_module('swe17.rollout.manager').run(cfg, chosen.index)
    if chosen.role in ('controller', 'relay'):
      return importlib.import_module('swe17.sync.relay').run(cfg, chosen.index)
    process.prepare_jax(cfg, chosen.role, chosen.index)
    if chosen.role == 'sampler':
      return importlib.import_module('swe17.sampler.server').run(cfg, chosen.index)
    learner = importlib.import_module('swe17.learner.loop')
    address = process.coordinator(cfg)
    return learner.run(cfg, chosen.resume, chosen.index, address)
  except Exception as e:
    said = _full_disk(e)
    if said is not None:
      return _refuse(said)
    traceback.print_exc()  # into the role's log
    if isinstance(e, ValueError):  # would only come again, so no restart
      return _refuse(_sentence(e))
    return 1


def _full_disk(e: BaseException | None) -> str | None:
  """A sentence if a disk that cannot be written is behind `e`; a restart is no help."""
  while e is not None:
    known = isinstance(e, OSError) and e.errno in _FULL_DISK
    if known or any(text in str(e) for text in _FULL_DISK_SAID):
      return f'{_sentence(e)}; make room and go on with --resume'
    e = e.__cause__ or e.__context__
  return None


def _sentence(e: BaseException) -> str:
  """One line that names the thing."""
  if isinstance(e, OSError) and e.filename and e.strerror:
    return f'{e.filename}: {e.strerror}'
  return ' '.join(str(e).split())


def _table() -> str:
  """Every setting with its default and its meaning."""
  values = settings.flatten(config.Config())
  rows = ['Settings (default, meaning):']
  for name, field in settings.leaves().items():
    shown = json.dumps(values[name])
    rows.append(f'  --config.{name}={shown:<12} {field.metadata["doc"]}')
  return '\n'.join(rows)


if __name__ == '__main__':
  sys.exit(main(sys.argv[1:]))
