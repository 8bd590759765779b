"""Code with anchors: every place where a single-token fault may sit is marked.

  def clamp(x, low):
      «1»if «n1»x«2» < «n2»low:     `edit(at='«2»', new=' <= ')` makes it `x <= low`
          return «n3»low

The `def` line has none. Numbered are binary operators, the words of conditions,
numbers, truth values and short strings; names and the rest have numbers of their own
behind an n. An anchor names the same place for a whole episode, whatever has been
written there, so an edit neither quotes code nor counts lines, and always applies.
"""

from collections.abc import Mapping, Sequence
import re
import tokenize

from swe17.env import sites

ANCHOR = re.compile(r'«(n?\d+)»')
_WORDS = frozenset(
  ('if', 'elif', 'while', 'and', 'or', 'not', 'is', 'in', 'True', 'False', 'None')
  + ('pass',)
)
_KEYWORDS = frozenset(
  ('as', 'assert', 'break', 'class', 'continue', 'def', 'del', 'else', 'except')
  + ('finally', 'for', 'from', 'global', 'import', 'lambda', 'nonlocal', 'raise')
  + ('return', 'try', 'with', 'yield', 'async', 'await')
)
_PAIRED = {'not': 'in', 'is': 'not'}  # words that are one place with the next one
_OPERATORS = frozenset({*sites.COMPARE, *sites.BINARY, *sites.AUGMENTED})
_PLAIN = frozenset(('elif', 'while', 'not', 'True', 'False'))
_INFIX = _OPERATORS | {'and', 'or', 'in', 'not in', 'is', 'is not', 'if'}


def split(source: str) -> list[str]:
  """Cuts a source that parses at its anchored places: these have the odd indices.

  `''.join(split(source)) == source`; place k (from 1) is at index 2 k - 1.
  """
  start_of_line = [0]
  for line in source.split('\n'):
    start_of_line.append(start_of_line[-1] + len(line) + 1)
  pieces, at = [], 0
  for row, tokens in sorted(sites.tokens_by_line(source).items()):
    if row == 1:
      continue
    for start, end in _places(tokens):
      start, end = start + start_of_line[row - 1], end + start_of_line[row - 1]
      pieces += [source[at:start], source[start:end]]
      at = end
  return [*pieces, source[at:]]


def _places(tokens: Sequence[sites.Token]) -> list[tuple[int, int]]:
  """(start, end) columns of a line's anchored places."""
  tokens = sorted(tokens, key=lambda token: token.start)
  places: list[tuple[int, int]] = []
  after_for = taken = False
  for before, token, after in zip(
    [None, *tokens], tokens, [*tokens[1:], None], strict=False
  ):
    after_for |= token.string == 'for'
    if taken or (after_for and token.string == 'in'):  # `for x in`: no operator
      taken, after_for = False, after_for and token.string != 'in'
      continue
    end = token.end
    if after is not None and _PAIRED.get(token.string) == after.string:
      end, taken = after.end, True
    if _anchored(before, token):
      places.append((token.start, end))
  return places


def _anchored(before: sites.Token | None, token: sites.Token) -> bool:
  if token.type == tokenize.OP:
    return token.string in _OPERATORS and before is not None and before.operand
  if token.type == tokenize.NAME:
    return token.string in _WORDS or token.string not in _KEYWORDS
  return token.type in (tokenize.NUMBER, tokenize.STRING)


def names(pieces: Sequence[str]) -> dict[str, int]:
  """Anchor (without its marks) -> index in `pieces`, in the order of the code."""
  found: dict[str, int] = {}
  plain = other = 0
  for index in range(1, len(pieces), 2):
    if _numbered(pieces[index]):
      plain += 1
      found[str(plain)] = index
    else:
      other += 1
      found[f'n{other}'] = index
  return found


def _numbered(text: str) -> bool:
  short = text[0] in '\'"' and len(text) <= 4
  return text in _INFIX or text in _PLAIN or text[0].isdigit() or short


def view(pieces: Sequence[str], anchors: Mapping[str, int]) -> str:
  """The code, each place behind its anchor; an infix operator keeps its spaces."""
  text = ''
  for name, index in anchors.items():
    text += pieces[index - 1]
    spaced = pieces[index] in _INFIX and text.endswith(' ')
    if spaced and not text.rsplit('\n', 1)[-1].isspace():
      text = f'{text[:-1]}«{name}» {pieces[index]}'
    else:
      text += f'«{name}»{pieces[index]}'
  return text + pieces[-1]


def strip(text: str) -> str:
  """The code of a view, without its anchors."""
  return ANCHOR.sub('', text)
