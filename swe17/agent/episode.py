"""One episode: an agent's attempt at a task, every token recorded as it was served.

  prompt -> [generate -> parse -> run the calls -> results]* -> verify

The context only grows: sampled ids as they came (mask True, with log-prob, entropy,
version and kept set), prompt, results and glue by id (mask False). With
`thoughts='strip'` a turn that opened with a thought is followed by a new segment, whose
context has the same ids but those of the thought. How it ends:

  submitted            the verifier's outcome
  malformed call       outcome 0 (`on_malformed='end'`), none of that turn's calls runs
  no call, turn limit,
  no room left         outcome 0: not submitted
  infrastructure       no outcome, status 'invalid': a connection, the operating system,
                       the grader, an answer that lacks what a token must carry, or the
                       wall clock (turns and tokens bound the agent, so it is not slow)
  signs of cheating    outcome 0, however it ended

Families that score every turn (`base.turn_score`) have the scores in `turn_scores`, 0
for a turn that was malformed or had no call, and for all turns of who cheated. They
keep at a limit what turns have earned.

Anything else that is raised is a bug and is passed on.
"""

import asyncio
from collections.abc import Awaitable, Callable
import dataclasses
import textwrap
import time

import numpy as np
import xxhash

from swe17 import config, types
from swe17.agent import formats, record, tools
from swe17.env import base
from swe17.env.audit import cheating

Generate = Callable[[types.GenerateRequest], Awaitable[types.GenerateResult]]


async def run(
  *,
  task: types.Task,
  env: base.Env,
  generate: Generate,
  fmt: formats.Format,
  cfg: config.Agent,
  sampling: types.Sampling,
  seed: int,
  group_id: str,
  member: int,
  clock: Callable[[], float] = time.monotonic,
) -> types.Episode:
  """Runs one episode to its end; see the module for what each end means.

  `seed`, `group_id` and `member` key every draw, so an episode replays alone. No more
  than `cfg.max_context` tokens are recorded: results that no longer fit are left out.
  """
  start = clock()
  log = record.Record(fmt, clock)
  limit = asyncio.timeout(cfg.episode_seconds)
  try:
    async with limit:
      outcome = await _turns(
        log,
        prompt=fmt.prompt(task.prompt, env.tools),
        env=env,
        generate=generate,
        cfg=cfg,
        request_of=lambda segment: types.GenerateRequest(
          session=f'{group_id}.{member}.{segment}',
          token_T=np.zeros(0, np.int32),
          max_new=cfg.max_new_tokens,
          stop_ids=fmt.stop_ids,
          sampling=sampling,
          key=draw_key(seed, group_id, member, segment),
        ),
      )
      await log.score(env)
  except (OSError, base.InfrastructureError, record.SamplerError) as e:
    # TimeoutError and ConnectionError are OSErrors.
    late = f'episode took over {cfg.episode_seconds:g} s'
    outcome = types.Outcome(
      None, late if limit.expired() else f'{type(e).__name__}: {e}'
    )
  outcome = cheating.judged(outcome, base.flags(env))
  scores = [0.0] * len(log.scores) if outcome.cheated else log.scores
  return record.episode(
    task,
    group_id,
    member,
    outcome,
    segments=log.segments(),
    turns=log.turns,
    calls=log.calls,
    malformed=log.malformed,
    tests=log.tests,
    submitted=env.done,
    sampled_tokens=log.drawn,
    thinking_tokens=log.thinking,
    topk_bound=log.topk_bound,
    tool_seconds=log.tool_seconds,
    seconds=clock() - start,
    cut=log.cut,
    duplicate_calls=log.duplicates,
    turn_scores=tuple(scores) or None,
  )


def draw_key(
  seed: int, group_id: str, member: int, segment: int | str
) -> tuple[int, int]:
  """Two uint32 that key a segment's draws; the sampler folds in the position.

  `segment` is its number, or the name of a branch (`tree.Draw.name`).
  """
  digest = xxhash.xxh3_64_intdigest(f'{seed}/{group_id}/{member}/{segment}'.encode())
  return digest >> 32, digest & 0xFFFFFFFF


async def _turns(
  log: record.Record,
  *,
  prompt: list[int],
  env: base.Env,
  generate: Generate,
  cfg: config.Agent,
  request_of: Callable[[int], types.GenerateRequest],
) -> types.Outcome:
  """The loop. Raises what `run` makes an invalid episode of."""
  fmt, request = log.fmt, request_of(0)
  if len(prompt) >= cfg.max_context:
    reason = f'prompt: {len(prompt)} tokens, agent.max_context is {cfg.max_context}'
    return types.Outcome(None, reason)
  log.given(prompt)
  for turn in range(cfg.max_turns):
    request = dataclasses.replace(
      request,
      token_T=np.asarray(log.token, np.int32),
      max_new=min(cfg.max_new_tokens, cfg.max_context - len(log.token)),
      routes_from=log.routed,
    )
    result = await generate(request)
    record.check_result(result, request, fmt.vocab_size)
    log.sampled(result, turn, request.sampling.temperature)
    drawn = result.token_T.tolist()
    calls = [tools.check(call, env.tools) for call in fmt.parse(drawn).calls]
    bad = [call for call in calls if call.error]
    log.malformed += len(bad)
    unfinished = result.finish == 'length' and (
      not calls or calls[-1].error == tools.CUT
    )
    if bad and cfg.on_malformed == 'end':
      log.cut = unfinished
      return types.Outcome(0.0, f'malformed call: {bad[0].error}')
    if not calls:
      log.cut = unfinished
      return await _not_submitted(log, env, 'a turn without a call')
    results = await log.run(calls, env, most=cfg.max_calls, seconds=cfg.call_seconds)
    await log.score(env)
    if env.done:
      return await env.verify()
    glue = fmt.results(drawn, calls, [result.text for result in results])
    kept = fmt.without_thought(drawn) if cfg.thoughts == 'strip' else drawn
    if len(log.token) - len(drawn) + len(kept) + len(glue) >= cfg.max_context:
      log.cut = True
      return await _not_submitted(log, env, 'no room left in the context')
    if turn + 1 == cfg.max_turns:
      break  # results that nobody reads are left out
    if kept == drawn:
      log.given(glue)
    else:
      context = [*log.token[: -len(drawn)], *kept, *glue]
      request = request_of(log.open_segment(context))
  log.cut = True
  return await _not_submitted(log, env, 'turn limit')


async def _not_submitted(log: record.Record, env: base.Env, why: str) -> types.Outcome:
  """0; where every turn is scored, what the turns have earned all the same."""
  earned = await env.verify() if log.scores else types.Outcome(0.0)
  return dataclasses.replace(earned, reason=earned.reason or f'not submitted: {why}')


def transcript(episode: types.Episode, fmt: formats.Format) -> str:
  """An episode to read: markdown, one section a message."""
  value = episode.outcome.value
  score = 'none' if value is None else f'{value:g}'
  reason = f' ({episode.outcome.reason})' if episode.outcome.reason else ''
  lines = [
    f'# {episode.task_id}, episode {episode.id}',
    '',
    f'- outcome {score}{reason}, {"solved" if episode.solved else "not solved"}, '
    f'{episode.status}{", cut" if episode.cut else ""}',
    f'- {episode.turns} turns, {episode.calls} calls, {episode.tests} tests, '
    f'{episode.malformed} malformed',
    f'- {episode.sampled_tokens} sampled tokens, {episode.thinking_tokens} thinking, '
    f'{episode.seconds:.1f} s, {episode.tool_seconds:.1f} s in tools',
  ]
  for segment in episode.segments:
    stats = _stats(segment, segment.mask_T)
    lines.append(f'- segment: {segment.token_T.size} tokens in all, {stats}')
    turn = 0
    for role, text in fmt.messages(segment.token_T.tolist()):
      title = role
      if role == 'assistant':
        own = segment.mask_T & (segment.turn_T == turn)
        turn += 1
        title = f'turn {turn}: {_stats(segment, own)}'
      lines += ['', f'## {title}', '', textwrap.indent(text, '    ', lambda _: True)]
  return '\n'.join(lines) + '\n'


def _stats(segment: types.Segment, own: np.ndarray) -> str:
  """Count, mean entropy and weight versions of the sampled tokens in `own`."""
  if not own.any():
    return 'none sampled'
  low, high = int(segment.version_T[own].min()), int(segment.version_T[own].max())
  versions = f'version {low}' if low == high else f'versions {low} to {high}'
  return (
    f'{int(own.sum())} sampled, mean entropy '
    f'{segment.entropy_T[own].mean():.3f} nats, {versions}'
  )
