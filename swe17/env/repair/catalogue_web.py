"""Functions of URLs, markup, headers and cookies, and what to call them with."""

# Names and not only the module: what follows is read as a table.
from swe17.env.repair import inputs
from swe17.env.repair.inputs import (
  dicts,
  entry,
  ints,
  joined,
  lists,
  parts,
  pick,
  text,
  tuples,
)

_URL = parts('a b / / ? # ; : @ = & http: .c', 0, 7)
_MARKUP = parts('a & < > " \' \n \r \t b', 0, 7)
_HOST = parts('a b .com .local . 1.2.3.4 www. B', 0, 4)

ENTRIES = (
  entry('urllib.parse._splithost', joined(pick('//', '//', '/', ''), _URL)),
  entry('urllib.parse._splitnetloc', _URL, ints(0, 3)),
  entry('urllib.parse._splitnport', parts('host : 80 x : 7', 0, 4), pick(-1, 99)),
  entry('urllib.parse._splitparams', parts('a / ; b ;c /d', 0, 6)),
  entry(
    'urllib.parse.quote_from_bytes',
    inputs.encoded(text('ab/ %\xe9~', 0, 6)),
    inputs.either(pick('/', '', '%/'), pick(b'/', b'\xff/')),
  ),
  entry(
    'urllib.parse.unwrap',
    joined(
      pick('<', '', ' <'),
      pick('URL:', '', 'URL'),
      text('ab ', 0, 4),
      pick('>', '', '> '),
    ),
  ),
  entry('urllib.parse.urldefrag', _URL),
  entry('urllib.parse.urlparse', _URL),
  entry(
    'urllib.parse.urlunsplit',
    tuples(
      pick('', 'http', 'mailto'),
      pick('', 'h.c'),
      pick('', '/p', 'p', '//q'),
      pick('', 'a=b'),
      pick('', 'f'),
    ),
  ),
  entry('xml.sax.saxutils.quoteattr', _MARKUP),
  entry('xml.etree.ElementTree._escape_cdata_c14n', _MARKUP),
  entry('xml.dom.minidom._nssplit', parts('a : b : c', 0, 5)),
  entry('http.cookiejar.is_HDN', _HOST),
  entry(
    'http.cookiejar.domain_match',
    joined(
      pick('x.', 'Y.', 'acme.', ''), pick('foo.com', 'acme.com', 'Foo.com', '1.2.3.4')
    ),
    pick(
      '.foo.com',
      'foo.com',
      'acme.com',
      '.acme.com',
      'x.foo.com',
      '.4',
      '.com',
      'Y.foo.com',
      '1.2.3.4',
      '.Foo.com',
      '..com',
    ),
  ),
  entry(
    'http.cookiejar.user_domain_match',
    joined(pick('x.', 'Y.', ''), pick('foo.com', 'Foo.com', '1.2.3.4')),
    pick(
      '.foo.com',
      'foo.com',
      'x.foo.com',
      '.4',
      '.com',
      'Y.foo.com',
      '1.2.3.4',
      '.Foo.com',
      'com',
    ),
  ),
  entry('http.cookiejar.reach', _HOST),
  entry(
    'http.cookiejar.offset_from_tz_string',
    inputs.either(
      pick('UTC', 'GMT', 'Z', 'EST'),
      joined(
        pick('+', '-', ''),
        pick('01', '12', '7', '00'),
        pick('', ':', ''),
        pick('', '30', '45', '5'),
      ),
    ),
  ),
  entry(
    'http.cookiejar.iso2time',
    joined(
      pick('1994', '2011', '1970'),
      pick('-02-', '-12-', '0'),
      pick('03', '28', '31'),
      pick('', ' 07:08:09', 'T23:59', ' 00:00:00 -0100', 'Z'),
    ),
  ),
  entry(
    'wsgiref.headers._formatparam',
    pick('a', 'file'),
    pick(None, '', 'b', 'c d', 'e"f', 'g\\h', 'i;', 'jk', 'l=m', 'n'),
    pick(0, 1, True),
  ),
  entry(
    'wsgiref.util.request_uri',
    inputs.then(
      tuples(
        pick('', '/app'),
        pick('', '/x', '/y z', 'w'),
        pick('', 'q=1'),
        pick('h', 'h:81'),
        pick('http', 'https'),
      ),
      lambda t: dict(
        zip(
          ('SCRIPT_NAME', 'PATH_INFO', 'QUERY_STRING', 'HTTP_HOST', 'wsgi.url_scheme'),
          t,
          strict=True,
        )
      ),
    ),
    pick(True, False, 1, 0),
  ),
  entry(
    'importlib.metadata._itertools.always_iterable',
    inputs.either(
      pick(None, 'ab', b'ab'), ints(0, 9), lists(ints(0, 9), 0, 4), text('ab', 0, 4)
    ),
  ),
  entry('enum._iter_bits_lsb', ints(-9, 300)),
  entry('locale._grouping_intervals', lists(pick(3, 2, 127, 4, 3, 0), 0, 4)),
  entry(
    'unittest.mock._format_call_signature',
    pick('f', 'g'),
    pick((), (1,), (1, 'a'), ('b',)),
    dicts(pick('k', 'm'), ints(0, 9), 0, 2),
  ),
)
