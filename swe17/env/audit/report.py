"""The report of the pipeline: one HTML file that opens offline, of its JSON alone."""

import base64
from collections import Counter
from collections.abc import Mapping, Sequence
import importlib.resources
import io
from typing import Any

import jinja2
from matplotlib import figure

_NOT = 'not tried'


def totals(reports: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
  """Figures over all families: error rates by solutions, not by families."""
  out: dict[str, Any] = {'tasks': sum(r['tasks'] - len(r['barred']) for r in reports)}
  for name, kind in (('accept_wrong', 'accepted_wrong'), ('reject_right', '')):
    errors = sum(len(r[kind or 'rejected_right']) for r in reports)
    count = sum(r[f'{name}_count'] for r in reports)
    out[name] = round(errors / count, 4) if count else None
  out['exploits_tried'] = sum(r['exploits_tried'] for r in reports)
  out['exploits_scored'] = sum(len(r['exploits_scored']) for r in reports)
  out['exploits_unflagged'] = sum(len(r['exploits_unflagged']) for r in reports)
  for name in ('gold_played', 'gold_solved', 'null_solved'):
    out[name] = sum(r[name] for r in reports)
  out['leaks'] = sum(len(r['leaks']) for r in reports)
  return out


def render(reports: Sequence[Mapping[str, Any]], command: str = '') -> str:
  """The report as HTML."""
  whole = totals(reports)
  cards = [
    ('tasks', whole['tasks'], False),
    ('wrong solutions accepted', _share(whole['accept_wrong']), False),
    ('right solutions rejected', _share(whole['reject_right']), False),
    ('gold played, solved', f'{whole["gold_played"]}, {whole["gold_solved"]}', False),
    ('exploits tried', whole['exploits_tried'], False),
    ('exploits that scored', whole['exploits_scored'], whole['exploits_scored'] > 0),
    ('leaks', whole['leaks'], whole['leaks'] > 0),
  ]
  environment = jinja2.Environment(
    autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True
  )
  source = importlib.resources.files('swe17.env.audit').joinpath('report.html.j2')
  return environment.from_string(source.read_text('utf-8')).render(
    command=command, cards=cards, families=[_family(each) for each in reports]
  )


def _share(value: float | None) -> str:
  return _NOT if value is None else f'{100 * value:.2f} %'


def _family(report: Mapping[str, Any]) -> dict[str, Any]:
  reasons = Counter(report['barred'].values())
  reasons.update(report.get('rejected', {}))
  reasons.update(report.get('set_aside', {}).values())
  labels = [
    (f'{kind}: {label}', errors, count)
    for kind, name in (('wrong', 'accept_wrong'), ('right', 'reject_right'))
    for label, (errors, count) in report[f'{name}_labels'].items()
  ]
  return {
    'examples': [],
    'difficulty': None,
    'set_aside': {},
    **report,
    'reasons': reasons.most_common(),
    'labels': labels,
    'errors': [*report['accepted_wrong'], *report['rejected_right']],
    'picture': _picture(labels),
  }


def _picture(labels: Sequence[tuple[str, int, int]]) -> str:
  """Share judged wrongly by kind of solution, as an embedded PNG; '' for none."""
  if not labels:
    return ''
  made = figure.Figure(figsize=(7, 0.5 + 0.24 * len(labels)), layout='constrained')
  axes = made.add_subplot()
  names = [f'{label} ({count})' for label, _, count in labels]
  shares = [100 * errors / count for _, errors, count in labels]
  axes.barh(names, shares, color='#0072b2')
  axes.invert_yaxis()
  axes.axvline(5, color='#d55e00', linewidth=1)  # what both rates must stay below
  axes.set_xlim(0, max(6.0, *shares))
  axes.set_xlabel('judged wrongly [%]')
  axes.tick_params(labelsize=7)
  for side in ('top', 'right'):
    axes.spines[side].set_visible(False)
  file = io.BytesIO()
  made.savefig(file, format='png', dpi=110)
  return 'data:image/png;base64,' + base64.b64encode(file.getvalue()).decode()
