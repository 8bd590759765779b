"""A turn's text as it comes: up to a stop string, thought and content apart.

Everything here tells only what no later token can take back. Half a character, what may
be the beginning of a stop string, of a tag or of a call, and white space that may be
the last, wait. Told pieces joined are the whole, and the whole is `Format.spoken`'s.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from swe17.agent import history, tokenizer

_OPEN, _CLOSE = tokenizer.THINK, tokenizer.THINK_END


def beginning(text: str, *wanted: str) -> int:
  """Characters at the end of `text` that may begin one of `wanted`."""
  most = min(len(text), max(map(len, wanted), default=0))
  for n in range(most, 0, -1):
    end = text[-n:]
    if any(len(each) > n and each.startswith(end) for each in wanted):
      return n
  return 0


class Stops:
  """Ends a text before the first stop string that it completes."""

  def __init__(self, stops: Sequence[str]):
    self._stops, self._held = tuple(stops), ''
    self.found = False

  def add(self, text: str) -> str:
    """What is certain of the text with `text` at its end."""
    held = self._held + text
    places = [at for at in map(held.find, self._stops) if at >= 0]
    if places:
      self.found, self._held = True, ''
      return held[: min(places)]
    keep = len(held) - beginning(held, *self._stops)
    self._held = held[keep:]
    return held[:keep]

  def end(self) -> str:
    """What waited, where no stop string came of it."""
    held, self._held = self._held, ''
    return held


class Splitter:
  """Tells the thought and the content of a turn that is being drawn."""

  def __init__(self, marks: history.Marks, calls: bool):
    """`calls`: whether calls are taken out of the text."""
    self._marks, self._calls = marks, calls
    self._held = ''
    self._step = self._begin
    self._thought: list[str] = []
    self._content: list[str] = []
    self._lead = calls  # white space at the beginning of the content is dropped

  def add(self, text: str) -> tuple[str, str]:
    """(thought, content) that became certain with `text`."""
    self._held += text
    told = len(self._thought), len(self._content)
    while self._step():
      pass
    return ''.join(self._thought[told[0] :]), ''.join(self._content[told[1] :])

  def end(self, message: Mapping[str, Any]) -> tuple[str, str]:
    """What is still to be told of the finished turn's message."""
    thought, content = ''.join(self._thought), ''.join(self._content)
    whole = message.get('reasoning_content') or '', message.get('content') or ''
    assert whole[0].startswith(thought), f'told {thought[-40:]!r} too much'
    assert whole[1].startswith(content), f'told {content[-40:]!r} too much'
    return whole[0][len(thought) :], whole[1][len(content) :]

  def _begin(self) -> bool:
    """Before it is clear what the turn begins with."""
    start = self._held.lstrip()
    if start.startswith(_OPEN):
      self._held = start[len(_OPEN) :]
      self._step = self._think
    elif _OPEN.startswith(start) or (self._marks.inside is None and not self._closed):
      return False
    else:
      self._step = self._say if self._marks.inside is False else self._think
    return True

  @property
  def _closed(self) -> bool:
    return _CLOSE in self._held

  def _think(self) -> bool:
    inside, end, rest = self._held.partition(_CLOSE)
    if end:
      self._tell(self._thought, inside)
      self._held, self._lead, self._step = rest, True, self._say
      return True
    keep = len(self._held) - beginning(self._held, _CLOSE)
    rest = self._held[keep:]
    self._held = self._tell(self._thought, self._held[:keep]) + rest
    return False

  def _say(self) -> bool:
    if not self._calls:
      text = self._held.lstrip() if self._lead and not self._content else self._held
      self._content += [text] if text else []
      self._held = ''
      return False
    bare = self._marks.bare and not self._content
    places = [at for at in map(self._held.find, self._marks.opens) if at >= 0]
    if places or (bare and self._held.lstrip().startswith('{')):
      if places:
        self._tell(self._content, self._held[: min(places)])
      self._held, self._step = '', self._call
      return False
    keep = len(self._held) - beginning(self._held, *self._marks.opens)
    rest = self._held[keep:]
    self._held = self._tell(self._content, self._held[:keep]) + rest
    return False

  def _call(self) -> bool:
    """From the first call on only the finished turn tells what is content."""
    self._held = ''
    return False

  def _tell(self, where: list[str], text: str) -> str:
    """Tells `text` but for the white space around it. What is left at its end."""
    if not where:
      text = text.lstrip()
    told = text.rstrip()
    where += [told] if told else []
    return text[len(told) :]
