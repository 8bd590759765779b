"""Publishes weight versions: data first, manifest last, nothing ever overwritten.

  encode -> data objects under fresh names -> read back -> create the manifest

Every `full_every` versions a full snapshot is due. A version whose base is known is
then stored both ways, as the delta that it is and as a full snapshot that its manifest
names (manifest.py): who keeps up never reads the whole again, and who joins or heals
does. A version whose base is not known is a full snapshot only.

Until the manifest is there the version does not exist, and its creation is conditional
on its absence: a crash leaves objects that nobody refers to, and of two publishers one
wins. A delta is taken against what was *published* last, not against what was computed:
a version known to be in the store, byte for byte. A restarted learner reads it back
(`restore`), verified as any follower would; without it the next version is a full
snapshot. A chain is held together by digests, so it may run through several attempts.
The disk and the way to it are not trusted (upload.py).
"""

from collections.abc import Mapping
import dataclasses
import logging
import threading
import time
from typing import Any

import numpy as np

from swe17 import config
from swe17.store import kv
from swe17.sync import codec, collect, manifest, pack, pieces, resume, upload
from swe17.sync import plan as plans

_log = logging.getLogger(__name__)

latest = manifest.latest
PublishConflict = upload.PublishConflict


@dataclasses.dataclass(frozen=True)
class Published:
  """What publishing one version came to."""

  version: int
  digest: str
  bytes: int  # of its data: what a follower reads that holds the base, if it has one
  full_bytes: int | None  # of its full snapshot, which may be the same, if it has one
  raw_bytes: int
  changed_share: float  # elements whose bits changed; 1 without a base
  seconds: float
  full: bool  # nothing but a full snapshot: every follower reads all of it


class Publisher:
  """Publishes to one store. One call at a time, from any thread.

  attempt: names this process, freshly for each start of a learner.
  grid: how sharded tensors and stacks of experts are cut into pieces; None: not at all.
  """

  def __init__(
    self,
    store: kv.Store,
    cfg: config.Sync,
    *,
    attempt: str,
    grid: pieces.Grid | None = None,
  ):
    self._store = store
    self._upload = upload.Upload(store, attempt)
    self._cfg = cfg
    self._grid = grid or {}
    self._lock = threading.Lock()
    self._last: resume.Last | None = None
    self._unsure = False  # a call failed: its version may be in the store
    self._known: dict[int, collect.Entry] = {}

  def restore(self, seconds: float) -> int | None:
    """Takes the newest version in the store as the base of the next delta.

    Every byte is verified. None, and the reason logged, if that fails or is not done
    within `seconds`: the next version is then a full snapshot only.
    """
    found: list[resume.Last | None] = []

    def read() -> None:
      found.append(resume.last(self._store, self._upload, self._cfg.threads))

    reader = threading.Thread(target=read, name='restore', daemon=True)
    reader.start()
    reader.join(seconds)
    if not found:
      _log.warning(
        'the base was not read within %g s: the next version is full', seconds
      )
      return None
    with self._lock:
      self._last = found[0]
    return None if found[0] is None else found[0].manifest.version

  def publish(
    self,
    version: int,
    tensors: Mapping[str, np.ndarray],
    *,
    step: int,
    plan: Mapping[str, Any],
    full: bool = False,
  ) -> Published:
    """Publishes `tensors` as `version`, the one after the newest in the store.

    tensors: host copies that nobody writes to until the next version is published.
    full: as a full snapshot only, which every follower reads.
    ValueError: weights that are not finite, a version that leaves a gap, a plan that
    is not one. PublishConflict: another learner published this version or a later one
    (nothing is changed; a repeated call with the same weights is no conflict).
    StoreError: the store failed several times in a row; calling again with the same
    version is safe, and takes up the same base.
    """
    with self._lock:
      began = time.monotonic()
      _check_finite(tensors)
      plans.check(plan)
      tensors = pieces.split(tensors, self._grid)
      last, unsure = self._last, self._unsure
      self._last, self._unsure = None, True  # whatever else fails, the base is gone
      try:
        made = self._publish(version, tensors, step, plan, full, last, unsure)
      except kv.StoreError:
        self._last = last  # it was published, whatever became of this version
        raise
      self._unsure = False
      at = version if made.starts or last is None else last.full_at
      self._last = resume.Last(made, dict(tensors), at)
      if made.starts:
        self._collect(version)
      return _published(made, tensors, began)

  def _publish(
    self,
    version: int,
    tensors: Mapping[str, np.ndarray],
    step: int,
    plan: Mapping[str, Any],
    full: bool,
    last: resume.Last | None,
    unsure: bool,
  ) -> manifest.Manifest:
    """Brings one version into the store, or finds that an earlier call did."""
    follows = last is not None and version == last.manifest.version + 1
    if unsure or not follows:  # else: the next one, creating it will tell
      theirs = self._existing(version)
      if theirs is not None:
        return self._adopt(theirs, tensors)
    if full or not self._delta_fits(version, last, tensors):
      last = None
    made, beside = self._store_data(version, tensors, step, plan, last), None
    if last is not None and version - last.full_at >= self._cfg.full_every:
      beside = self._store_data(version, tensors, step, plan, None)
      if beside.digest != made.digest:
        raise ValueError('tensors were written to while they were published')
      made = dataclasses.replace(made, full=self._upload.full(beside))
    stands = self._upload.version(made)
    if stands is made:  # else: an earlier call's, with names of its own
      self._known[version] = collect.entry(made, beside)
    return stands

  def _store_data(
    self,
    version: int,
    tensors: Mapping[str, np.ndarray],
    step: int,
    plan: Mapping[str, Any],
    last: resume.Last | None,
  ) -> manifest.Manifest:
    """Encodes and stores a version, on `last` or in full; a manifest not yet stored."""
    cfg = self._cfg
    rows, objects, share = pack.pack(
      tensors,
      last.tensors if last else None,
      last.manifest.tensors if last else (),
      codec=cfg.codec,
      block_bytes=cfg.block_bytes,
      object_bytes=cfg.object_bytes,
      threads=cfg.threads,
    )
    return manifest.Manifest(
      version=version,
      base=last.manifest.version if last else None,
      base_digest=last.manifest.digest if last else '',
      codec=cfg.codec if last else 'full',
      step=step,
      created=time.time(),
      attempt=self._upload.attempt,
      block_bytes=cfg.block_bytes,
      objects=tuple(self._upload.data(version, data) for data in objects),
      tensors=rows,
      digest=manifest.digest(rows),
      changed_share=share,
      plan=dict(plan),
    )

  def _existing(self, version: int) -> manifest.Manifest | None:
    """The manifest that stands where `version` should go, if one does."""
    found = self._upload.read(version)
    if found is not None:
      return found
    newest = self._upload.latest()
    if newest is not None and newest >= version:
      raise PublishConflict(
        f'version {version} is older than the newest, {newest}: another learner is '
        'ahead on this run'
      )
    want = 0 if newest is None else newest + 1
    if version != want and (version == 0 or self._upload.read(version - 1) is None):
      raise ValueError(f'version: got {version}, want {want}: versions leave no gap')
    return None

  def _adopt(
    self, found: manifest.Manifest, tensors: Mapping[str, np.ndarray]
  ) -> manifest.Manifest:
    """Accepts a version as published if an earlier call of ours did publish it."""
    same = found.digest == codec.digest(tensors, found.block_bytes)
    if found.attempt != self._upload.attempt or not same:
      raise PublishConflict(
        f'version {found.version} was published by attempt {found.attempt!r} '
        f'(this is {self._upload.attempt!r}) with digest {found.digest}: two learners '
        'on one run; stop one of them'
      )
    return found

  def _delta_fits(
    self, version: int, last: resume.Last | None, tensors: Mapping[str, np.ndarray]
  ) -> bool:
    if last is None or last.manifest.version != version - 1:
      return False
    if last.manifest.block_bytes != self._cfg.block_bytes:
      return False  # restored from a learner with other settings
    mine = {n: (a.dtype, a.shape) for n, a in tensors.items()}
    return mine == {n: (a.dtype, a.shape) for n, a in last.tensors.items()}

  def _collect(self, version: int) -> None:
    """Deletes old versions; notices a learner that is ahead of this one."""
    try:
      done = collect.collect(
        self._store, version, self._cfg, self._known, self._upload.retry
      )
    except kv.StoreError as e:
      # Old versions that stay cost space only; the next full snapshot tries again.
      _log.warning('old weight versions were not deleted: %s', e)
      return
    if done.versions or done.orphans:
      _log.info(
        'versions below %d are deleted: %d, with %d objects (%d of attempts that died)',
        done.cutoff,
        done.versions,
        done.objects,
        done.orphans,
      )
    if done.found and done.found[-1] > version:
      raise PublishConflict(
        f'version {version} is out, but the newest is {done.found[-1]}: another '
        'learner is ahead on this run'
      )


def _check_finite(tensors: Mapping[str, np.ndarray]) -> None:
  if not tensors:
    raise ValueError('publish: got no tensors')
  for name, array in tensors.items():
    if array.dtype.name == 'bfloat16':
      bits = array.view(np.uint16) & 0x7F80
      count = int(np.count_nonzero(bits == 0x7F80))
    elif array.dtype.kind == 'f':
      count = int(np.count_nonzero(~np.isfinite(array)))
    else:
      continue
    if count:
      raise ValueError(
        f'tensor {name!r} has {count} of {array.size} values that are not finite; '
        'these weights are not published'
      )


def _published(
  made: manifest.Manifest, tensors: Mapping[str, np.ndarray], began: float
) -> Published:
  return Published(
    version=made.version,
    digest=made.digest,
    bytes=made.data_bytes,
    full_bytes=made.full_bytes,
    raw_bytes=sum(array.nbytes for array in tensors.values()),
    changed_share=made.changed_share,
    seconds=time.monotonic() - began,
    full=made.base is None,
  )
