"""Element types, by torch's name, with the size of an element in bytes."""

import sys
from collections.abc import Mapping

DTYPE_BYTES: Mapping[str, int] = {"float32": 4, "float64": 8, "float16": 2, "bfloat16": 2}
"""Element types of parameters and rows."""

LARGEST: Mapping[str, float] = {
    "float32": (2 - 2**-23) * 2.0**127,
    "float64": sys.float_info.max,
    "float16": 65504.0,
    "bfloat16": (2 - 2**-7) * 2.0**127,
}
"""Largest finite number of each element type."""
MAX_SETTING = LARGEST["float32"]
"""Bound on an optimizer's settings and rates: updates are computed in float32 or float64."""

ITEM_BYTES: Mapping[str, int] = {
    **dict.fromkeys(("bool", "uint8", "int8"), 1),
    **dict.fromkeys(("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz"), 1),
    **dict.fromkeys(("float8_e8m0fnu", "float4_e2m1fn_x2"), 1),
    **dict.fromkeys(("float16", "bfloat16", "int16", "uint16"), 2),
    **dict.fromkeys(("float32", "int32", "uint32", "complex32"), 4),
    **dict.fromkeys(("float64", "int64", "uint64", "complex64"), 8),
    "complex128": 16,
}
"""Element types of published weights."""
