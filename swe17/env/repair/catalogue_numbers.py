"""Functions of numbers, dates, bits and colours, and what to call them with."""

# Names and not only the module: what follows is read as a table.
from swe17.env.repair import inputs
from swe17.env.repair.inputs import entry, floats, ints, lists, pick, raw, text, tuples

_YEAR = inputs.either(ints(1, 3000), pick(1900, 2000, 1996, 1999, 2100, 2400))
_UNIT = inputs.either(floats(0, 1), pick(0.0, 0.5, 1.0))
_NUMBERS = lists(ints(-20, 20), 0, 9)
_SOME_NUMBERS = lists(inputs.either(ints(-20, 20), floats(-9, 9, 1)), 0, 7)
_SMALL = ints(-40, 40)

ENTRIES = (
  entry('_pydecimal._decimal_lshift_exact', pick(0, 7, 120, -4500, 1000), ints(-4, 4)),
  entry('_pydecimal._div_nearest', ints(-99, 99), ints(1, 12)),
  entry('_pydecimal._rshift_nearest', ints(-300, 300), ints(1, 6)),
  entry('_pydecimal._sqrt_nearest', ints(-1, 5000), ints(0, 90)),
  entry('_strptime._calc_julian_from_V', ints(1970, 2040), ints(1, 53), ints(1, 7)),
  entry('calendar._nextmonth', ints(1, 3000), pick(1, 2, 6, 11, 12)),
  entry('calendar._prevmonth', ints(1, 3000), pick(1, 2, 6, 11, 12)),
  entry('calendar.leapdays', _YEAR, _YEAR),
  entry('calendar.monthrange', _YEAR, pick(0, 1, 2, 2, 2, 3, 4, 7, 11, 12, 13)),
  entry(
    'calendar.weekday',
    inputs.either(_YEAR, ints(9990, 12000)),
    ints(1, 12),
    ints(1, 29),
  ),
  entry(
    'calendar.timegm',
    tuples(
      ints(1950, 2050), ints(1, 12), ints(1, 28), ints(0, 23), ints(0, 59), ints(0, 59)
    ),
  ),
  entry('colorsys._v', _UNIT, _UNIT, floats(-1, 2)),
  entry('colorsys.hls_to_rgb', _UNIT, _UNIT, _UNIT),
  entry('colorsys.rgb_to_yiq', _UNIT, _UNIT, _UNIT),
  entry('datetime._days_before_year', _YEAR),
  entry(
    'datetime._divide_and_round', ints(-60, 60), pick(-8, -5, -3, -2, 1, 2, 4, 5, 6)
  ),
  entry('zoneinfo._zoneinfo._post_epoch_days_before_year', _YEAR),
  entry('difflib._format_range_context', ints(0, 9), ints(0, 12)),
  entry('difflib._format_range_unified', ints(0, 9), ints(0, 12)),
  entry('email._encoded_words.len_b', raw(b'abc', 0, 40)),
  entry('email.base64mime.header_length', raw(b'abc', 0, 40)),
  entry('enum._is_single_bit', inputs.either(ints(0, 70), pick(64, 128, 256, 1024))),
  entry('enum._power_of_two', inputs.either(ints(-3, 70), pick(64, 128, 256, 1024))),
  entry('enum.bin', ints(-40, 40), pick(None, 1, 4, 6, 8)),
  entry('encodings.punycode.T', ints(0, 4), ints(0, 120)),
  entry('encodings.punycode.adapt', ints(0, 99999), pick(True, False), ints(1, 20)),
  entry('encodings.punycode.generate_generalized_integer', ints(0, 5000), ints(0, 90)),
  entry('encodings.punycode.generate_integers', ints(0, 9), lists(ints(0, 4000), 0, 4)),
  entry('encodings.punycode.selective_len', text('abcxyz', 0, 9), ints(96, 124)),
  entry(
    'encodings.punycode.selective_find',
    text('abc', 0, 9),
    pick('a', 'b', 'c'),
    ints(-2, 3),
    ints(-1, 4),
  ),
  entry('imaplib.Int2AP', inputs.either(_SMALL, ints(0, 99999))),
  entry(
    'pickle.encode_long',
    inputs.either(
      ints(-300, 300), ints(-70000, 70000), pick(0, -128, 128, 255, -256, 32768, -32768)
    ),
  ),
  entry(
    'plistlib._count_to_size',
    inputs.either(
      ints(0, 1000),
      ints(60000, 70000),
      pick(255, 256, 65535, 65536, 2**32 - 1, 2**32, 2**40),
    ),
  ),
  entry('statistics._integer_sqrt_of_frac_rto', ints(0, 9999), ints(1, 60)),
  entry('statistics._float_sqrt_of_frac', ints(1, 99999), ints(1, 999)),
  entry('statistics.median', _NUMBERS),
  entry('statistics.median_low', _NUMBERS),
  entry('statistics.pstdev', _SOME_NUMBERS),
  entry('statistics.pvariance', _NUMBERS, inputs.either(pick(None), ints(-9, 9))),
  entry('statistics.stdev', _SOME_NUMBERS),
  entry('statistics.variance', _NUMBERS, inputs.either(pick(None), ints(-9, 9))),
  entry('statistics._mean_stdev', _SOME_NUMBERS),
  entry(
    'tarfile.nti',
    inputs.either(
      raw(b'01234567', 3, 7),
      raw(b'08 9x', 3, 7),
      inputs.then(raw(b'\x00\x01\x02\x80\xfe\xff', 2, 5), lambda b: b'\x80' + b),
      inputs.then(raw(b'\x00\x01\x02\x80\xfe\xff', 2, 5), lambda b: b'\xff' + b),
    ),
  ),
  entry(
    'tracemalloc._format_size',
    inputs.either(ints(-900, 900), ints(-(2**22), 2**24), ints(2**30, 2**46)),
    pick(True, False),
  ),
  entry('zipfile._gen_crc', ints(0, 2**32 - 1)),
  entry(
    'stat.filemode',
    inputs.then(
      tuples(pick(0o10, 0o4, 0o12, 0o2, 0o6, 0o14), ints(0, 4095)),
      lambda p: (p[0] << 12) + p[1],
    ),
  ),
  entry('dis.pretty_flags', inputs.either(ints(0, 700), ints(0, 2**20))),
  entry(
    'email._parseaddr.mktime_tz',
    tuples(
      ints(1990, 2030),
      ints(1, 12),
      ints(1, 28),
      ints(0, 23),
      ints(0, 59),
      ints(0, 59),
      pick(0),
      pick(1),
      pick(-1),
      pick(0, 3600, -7200, 19800),
    ),
  ),
  entry('gzip._create_simple_gzip_header', pick(0, 1, 2, 5, 6, 8, 9), ints(0, 99999)),
  entry(
    're._compiler._combine_flags',
    ints(0, 511),
    pick(0, 2, 4, 32, 36, 256, 258),
    pick(0, 2, 8, 16),
  ),
  entry(
    'asyncio.sslproto.add_flowcontrol_defaults',
    pick(None, 0, 16, 64, 200),
    pick(None, 0, 4, 16, 64, 300),
    ints(1, 9),
  ),
  entry('_aix_support._aix_vrtl', inputs.parts('7 72 1 02 3 0004 15', 3, 5, '.')),
)
