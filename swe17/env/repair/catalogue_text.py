"""Functions of text, bytes and paths, and what to call them with."""

# Names and not only the module: what follows is read as a table.
from swe17.env.repair import inputs
from swe17.env.repair.inputs import (
  encoded,
  entry,
  ints,
  joined,
  lists,
  parts,
  pick,
  raw,
  text,
)

_PATH = parts('a bc / / // . .. .txt d.e', 0, 6)
_WIN_PATH = parts('a bc / \\ \\\\ . c: .txt d.e', 0, 5)
_MAGIC_RGB = joined(
  pick('P', 'P', 'Q'),
  pick('1', '2', '3', '4', '5', '6'),
  pick(' ', '\n', '\t', 'x', ''),
)

ENTRIES = (
  entry('ast._pad_whitespace', text('ab\t\x0c ', 0, 8)),
  entry('base64.b64encode', raw(b'\xfb\xff\xfea', 0, 9), pick(None, None, b'-_', b'-')),
  entry(
    'base64.b64decode',
    encoded(parts('ab cd +/ -_ AAAA ==', 1, 3)),
    pick(None, b'-_', b'*'),
  ),
  entry('plistlib._encode_base64', raw(b'abc\xff', 0, 60), pick(16, 20, 24, 76)),
  entry(
    'email.contentmanager._encode_base64', raw(b'abc\xff', 0, 60), pick(16, 20, 24, 76)
  ),
  entry(
    'email.base64mime.body_encode',
    raw(b'abc\xff', 0, 60),
    pick(16, 20, 24, 76),
    pick('\n', '\r\n'),
  ),
  entry('email.mime.image._pbm', encoded(_MAGIC_RGB)),
  entry('email.mime.image._pgm', encoded(_MAGIC_RGB)),
  entry('email.mime.image._ppm', encoded(_MAGIC_RGB)),
  entry('sndhdr.test_sndr', raw(b'\x00\x00\x00\x10\x20\x60\x90', 4, 4), pick(None)),
  entry(
    'sndhdr.test_sndt',
    inputs.then(
      raw(b'\x00\x01\x07', 18, 18), lambda b: (b'SOUND' if b[0] else b'SOUNX') + b
    ),
    pick(None),
  ),
  entry(
    'sndhdr.test_voc',
    inputs.then(
      raw(b'\x00\x01\x01\x01\x9c\xf0', 12, 12),
      lambda b: (
        b'Creative Voice File\x1a'[b[0] // 240 :]
        + bytes([26, 0])
        + b'..'
        + b'\x10\x01'
        + b
      ),
    ),
    pick(None),
  ),
  entry(
    'sndhdr.test_hcom',
    inputs.then(
      raw(b'\x00\x00\x00\x01\x02\x03', 5, 5),
      lambda b: (
        b'.' * 65
        + (b'FSSX' if b[4] == 3 else b'FSSD')
        + b'.' * 59
        + b'HCOM'
        + b'.' * 12
        + b[:4]
      ),
    ),
    pick(None),
  ),
  entry(
    'email.utils.unquote',
    joined(pick('"', '<', ''), parts('a \\" \\\\ b', 0, 3), pick('"', '>', '')),
  ),
  entry(
    'email.utils.encode_rfc2231',
    text('ab /%', 0, 5),
    pick(None, 'utf-8', 'ascii'),
    pick(None, 'en'),
  ),
  entry(
    'email.utils.collapse_rfc2231_value',
    inputs.either(
      text('"ab<>', 0, 4),
      inputs.tuples(
        pick(None, 'utf-8', 'x-none', 'latin-1'), pick('', 'en'), text('ab"\xe9', 0, 4)
      ),
    ),
  ),
  entry(
    'encodings.normalize_encoding',
    inputs.either(text('aB1-_ .\xe9', 0, 9), encoded(text('aB-_', 0, 6))),
  ),
  entry(
    'encodings.punycode.punycode_decode',
    parts('a b -  tda 4ca 8ia', 1, 3),
    pick('strict'),
  ),
  entry(
    'encodings.utf_8_sig.decode',
    inputs.then(
      inputs.tuples(
        pick(b'', b'\xef\xbb\xbf', b'\xef\xbb'), encoded(text('ab\xe9', 0, 4))
      ),
      b''.join,
    ),
  ),
  entry('enum._dedent', parts('\n \n ~~~~ ~~ a bb c', 1, 8)),
  entry('doctest._strip_exception_details', parts('a.b ValueError : . \n x~y', 0, 5)),
  entry(
    'ftplib.parse150',
    joined(pick('150 ', '151 ', '150'), parts('data (12 ~bytes) (7~bytes) x (', 1, 4)),
  ),
  entry(
    'ftplib.parse227',
    joined(
      pick('227 ', '227 ', '220 '),
      pick('(', 'x '),
      parts('1 20 3 7', 5, 7, ','),
      pick(')', ''),
    ),
  ),
  entry('getopt.short_has_arg', pick('a', 'b', 'c', ':'), parts('a a: b: c d', 0, 4)),
  entry(
    'json.decoder._decode_uXXXX', parts('u 00e9 00 xA g \\ 4e2d', 1, 4), ints(0, 3)
  ),
  entry(
    'locale._append_modifier',
    parts('de_DE .ISO8859-1 .UTF-8 .ISO8859-15 en .', 1, 2),
    pick('euro', 'euro', 'latin'),
  ),
  entry(
    'locale._parse_localename',
    joined(
      pick('de_DE', 'C', 'en_US', 'UTF-8', 'xx'),
      pick('', '.UTF-8', '.ISO8859-1', '.'),
      pick('', '', '@euro', '@latin'),
    ),
  ),
  entry(
    'locale._strip_padding',
    joined(text(' ', 0, 3), text('ab ', 1, 4), text(' ', 0, 3)),
    ints(0, 4),
  ),
  entry('ntpath.isabs', _WIN_PATH),
  entry('ntpath.split', _WIN_PATH),
  entry('posixpath.dirname', _PATH),
  entry('posixpath.split', _PATH),
  entry('platform._comparable_version', parts('1 2 10 a b1 rc . - p _', 1, 6)),
  entry('platform._norm_version', parts('1 02 3 x 10', 1, 5, '.'), pick('', '7', 'b')),
  entry('pprint._wrap_bytes_repr', raw(b'ab\xff', 0, 24), ints(6, 20), ints(0, 4)),
  entry('pydoc.cram', text('abcdef', 0, 20), ints(2, 18)),
  entry(
    'pydoc.replace',
    parts('a b ab c', 0, 6),
    pick('a', 'b', 'c'),
    pick('', 'x', 'b'),
    pick('b', 'x', 'ab'),
    pick('', 'y'),
  ),
  entry('pydoc.splitdoc', parts('a~b \n \n ~ c d', 1, 7)),
  entry(
    'quopri.needsquoting',
    encoded(pick(*' \t_=a~!\x7f\n\x1f"9')),
    pick(True, False),
    pick(True, False),
  ),
  entry('quopri.quote', raw(bytes(range(256)), 1, 1)),
  entry('quopri.unhex', encoded(text('0129afAF', 0, 3))),
  entry('smtplib.quoteaddr', parts('a@b.c A~B < > ~ x', 0, 4)),
  entry('ssl.DER_cert_to_PEM_cert', raw(b'abc\xff', 0, 99)),
  entry(
    'stringprep.in_table_a1',
    pick(
      *map(
        chr,
        (
          65,
          0x221,
          0x378,
          0xFDCF,
          0xFDD0,
          0xFDEF,
          0xFDF0,
          0xFFFE,
          0xFFFF,
          0x1FFFE,
          0x2FFFF,
          0xE0000,
          0x380,
          0x38B,
          0xFDEE,
          0xFDFE,
        ),
      ),
      *map(chr, range(0x370, 0x390)),
      *map(chr, range(0xFDC8, 0xFDD8)),
    ),
  ),
  entry(
    'stringprep.in_table_c4',
    pick(
      *map(
        chr,
        (
          *range(0xFDCC, 0xFDD4),
          *range(0xFDEC, 0xFDF4),
          0xFFFD,
          0xFFFE,
          0xFFFF,
          0x10000,
          0x1FFFD,
          0x1FFFE,
          0x1FFFF,
          0x20000,
          0x2FFFE,
          0x41,
          0x10FFFF,
        ),
      )
    ),
  ),
  entry(
    'tarfile.stn',
    inputs.either(text('ab\xe9', 0, 7), pick(None)),
    ints(1, 8),
    pick('utf-8', 'latin-1'),
    pick('strict'),
  ),
  entry(
    'tomllib._parser.parse_hex_char',
    parts('00e9 d800 4e2d 00 zz 00110000 0001', 1, 3),
    ints(0, 3),
    pick(4, 8),
  ),
  entry(
    'traceback._format_final_exc_line',
    pick('E', 'KeyError'),
    inputs.either(pick(None, ''), text('ab', 0, 3)),
  ),
  entry('uuid._parse_mac', encoded(parts('0a 1b f 00 9c abc', 5, 7, ':'))),
  entry('wave._byteswap', raw(b'abcdef', 12, 12), pick(1, 2, 3, 4, 6)),
  entry(
    'difflib.restore',
    lists(joined(pick('- ', '+ ', '  ', '? '), text('ab', 1, 2)), 0, 6),
    pick(1, 2, 2, 3),
  ),
  entry('cgi.parse_header', parts('text/plain ; ~ a=b c="d;e" q=\\ x="y', 0, 6)),
)
