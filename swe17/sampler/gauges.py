"""What a sampler tells Prometheus: the engine's counters, and requests by route.

https://prometheus.io/docs/instrumenting/exposition_formats/
"""

from collections.abc import Awaitable, Callable, Iterator
import time

from aiohttp import web
import prometheus_client
from prometheus_client import metrics_core, registry

from swe17.sampler import engine

TYPE = prometheus_client.CONTENT_TYPE_LATEST
_PREFIX = 'swe17_sampler_'
# What may go down; everything else that an engine counts only grows.
_GAUGES = {'pages_used', 'pages_total', 'waiting', 'busy_slots'}
_SECONDS = (0.1, 0.3, 1, 3, 10, 30, 100, 300)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class _Counters(registry.Collector):
  """The engine's own counters, read when somebody asks."""

  def __init__(self, serving: engine.Engine):
    self._serving = serving

  def collect(self) -> Iterator[metrics_core.Metric]:
    about = "of the engine's since its start"
    for name, value in self._serving.counters().items():
      kind = metrics_core.CounterMetricFamily
      if name in _GAUGES:
        kind = metrics_core.GaugeMetricFamily
      yield kind(_PREFIX + name, f'{name.replace("_", " ")} {about}', value=value)
    version = float(self._serving.version)
    yield metrics_core.GaugeMetricFamily(
      _PREFIX + 'weight_version', 'version of the weights that are served', version
    )


class Gauges:
  """Metrics of one sampler, in a registry of its own."""

  def __init__(self, serving: engine.Engine):
    self._registry = prometheus_client.CollectorRegistry()
    self._registry.register(_Counters(serving))
    self._answers = prometheus_client.Counter(
      _PREFIX + 'http_answers', 'answers by route and status', ('route', 'status'),
      registry=self._registry,
    )  # fmt: skip
    self._seconds = prometheus_client.Histogram(
      _PREFIX + 'http_seconds', 'seconds until an answer had ended', ('route',),
      registry=self._registry, buckets=_SECONDS,
    )  # fmt: skip

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
      began, status = time.monotonic(), 500
      # Not the path: there must be no more labels than routes.
      resource = request.match_info.route.resource
      route = resource.canonical if resource is not None else 'none'
      try:
        response = await handler(request)
        status = response.status
        return response
      except web.HTTPException as e:
        status = e.status
        raise
      finally:
        self._answers.labels(route, str(status)).inc()
        self._seconds.labels(route).observe(time.monotonic() - began)

    self.middleware = middleware

  def text(self) -> bytes:
    """All of it in the form that Prometheus reads."""
    return prometheus_client.generate_latest(self._registry)
