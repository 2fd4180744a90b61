/* Number formats, and arithmetic of PTX for which C has no operator. */
#pragma once
#include <math.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>

typedef uint8_t u8;
typedef uint16_t u16;
typedef uint32_t u32;
typedef uint64_t u64;
typedef int8_t s8;
typedef int16_t s16;
typedef int32_t s32;
typedef int64_t s64;
typedef __int128 s128;
typedef unsigned __int128 u128;

/* Registers are unsigned integers. Floating-point values are stored as their bits. */

#define SAME_BITS(name, to, from)            \
    static inline to name(from value)        \
    {                                        \
        to same;                             \
        memcpy(&same, &value, sizeof same);  \
        return same;                         \
    }

SAME_BITS(float_of, float, u32)
SAME_BITS(bits_of, u32, float)
SAME_BITS(double_of, double, u64)
SAME_BITS(bits_of_double, u64, double)
SAME_BITS(half_of, _Float16, u16)
SAME_BITS(bits_of_half, u16, _Float16)

static inline float flush(float x)
{
    u32 bits = bits_of(x);
    return bits & 0x7f800000 ? x : float_of(bits & 0x80000000);
}

static inline float saturate(float x)
{
    return x > 0.f ? fminf(x, 1.f) : 0.f;
}

/* 16-bit formats. Results are (nearly) exact in double, and are rounded once. */

static inline u16 f16_from(double x)
{
    return isnan(x) ? 0x7fff : bits_of_half((_Float16)x);
}

static inline u16 f16_from_float(float x)
{
    return isnan(x) ? 0x7fff : bits_of_half((_Float16)x);
}

static inline float f16_value(u16 bits)
{
    return (float)half_of(bits);
}

static inline u16 bf16_from_float(float x)
{
    u32 bits = bits_of(x);
    if ((bits & 0x7fffffff) > 0x7f800000)
        return 0x7fff;
    return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

static inline u16 bf16_from_float_towards_zero(float x)
{
    return isnan(x) ? 0x7fff : bits_of(x) >> 16;
}

static inline float bf16_value(u16 bits)
{
    return float_of((u32)bits << 16);
}

/* Rounding to odd first avoids double rounding at ties. */
static inline float float_to_odd(double x)
{
    float nearest = (float)x;
    double error = x - nearest;
    u32 bits = bits_of(nearest);
    if (error == 0 || isnan(error) || isinf(nearest) || bits & 1)
        return nearest;
    return float_of((error > 0) == (x > 0) ? bits + 1 : bits - 1);
}

static inline u16 bf16_from(double x)
{
    return bf16_from_float(float_to_odd(x));
}

/* x y + z of 16-bit values: the product is exact in double, the sum is rounded to odd. */
static inline double fma_to_odd(double x, double y, double z)
{
    double product = x * y;
    double sum = product + z;
    if (!isfinite(sum))
        return sum;
    double part = sum - product;
    double error = (product - (sum - part)) + (z - part);
    u64 bits = bits_of_double(sum);
    if (error == 0 || bits & 1)
        return sum;
    return double_of((error > 0) == (sum > 0) ? bits + 1 : bits - 1);
}

/* FP8: cvt.rn.satfinite. NaN is 0x7f; values above the largest finite value saturate. */

static inline u8 fp8_from(float x, int fraction_bits, int bias, u8 largest)
{
    u32 bits = bits_of(x);
    u32 sign = bits >> 31 << 7;
    bits &= 0x7fffffff;
    if (bits > 0x7f800000)
        return 0x7f;
    if (bits == 0x7f800000)
        return sign | largest;
    int exponent = (int)(bits >> 23) - 127;
    int least = 1 - bias;
    int shift = 23 - fraction_bits + (exponent < least ? least - exponent : 0);
    if (shift > 25)
        return sign;
    u32 significand = (bits & 0x7fffff) | 0x800000;
    u32 kept = significand >> shift;
    u32 rest = significand & ((1u << shift) - 1);
    u32 half = 1u << (shift - 1);
    kept += rest > half || (rest == half && kept & 1);
    /* The leading bit of a normal number is the lowest bit of its exponent field. */
    u32 code = (exponent < least ? 0 : (u32)(exponent - least) << fraction_bits) + kept;
    return sign | (code > largest ? largest : code);
}

static inline u8 e4m3_from(float x)
{
    return fp8_from(x, 3, 7, 0x7e);
}

static inline u8 e5m2_from(float x)
{
    return fp8_from(x, 2, 15, 0x7b);
}

static inline float e4m3_value(u8 code)
{
    if ((code & 0x7f) == 0x7f)
        return float_of(0x7fffffff);
    /* The same fields as float16, whose exponent bias is larger by 8. */
    return f16_value((u16)((code & 0x80) << 8 | (code & 0x7f) << 7)) * 256.f;
}

static inline float e5m2_value(u8 code)
{
    return (code & 0x7f) > 0x7c ? float_of(0x7fffffff) : f16_value((u16)(code << 8));
}

/* Conversions to integers saturate; NaN is converted to `nan`. */
#define TO_INTEGER(name, type, least, largest)      \
    static inline type name(double x, type nan)     \
    {                                               \
        if (isnan(x))                               \
            return nan;                             \
        if (x <= (double)(least))                   \
            return least;                           \
        return x >= (double)(largest) ? largest : (type)x; \
    }
TO_INTEGER(s8_from, s8, INT8_MIN, INT8_MAX)
TO_INTEGER(s16_from, s16, INT16_MIN, INT16_MAX)
TO_INTEGER(s32_from, s32, INT32_MIN, INT32_MAX)
TO_INTEGER(s64_from, s64, INT64_MIN, INT64_MAX)
TO_INTEGER(u8_from, u8, 0, UINT8_MAX)
TO_INTEGER(u16_from, u16, 0, UINT16_MAX)
TO_INTEGER(u32_from, u32, 0, UINT32_MAX)
TO_INTEGER(u64_from, u64, 0, UINT64_MAX)
#undef TO_INTEGER

/* min and max: the number if one operand is NaN, and -0 < +0. */

static inline double smaller(double a, double b)
{
    if (isnan(a) || isnan(b))
        return isnan(a) ? b : a;
    return a < b || (a == b && signbit(a)) ? a : b;
}

static inline double larger(double a, double b)
{
    if (isnan(a) || isnan(b))
        return isnan(a) ? b : a;
    return a > b || (a == b && !signbit(a)) ? a : b;
}

static inline double sign_of_product(double a, double b, double magnitude)
{
    return signbit(a) != signbit(b) ? -magnitude : magnitude;
}

/* The canonical NaN if both are NaN (or, for .NaN, if either is). */
static inline float canonical(double x)
{
    return isnan(x) ? float_of(0x7fffffff) : (float)x;
}

static inline double nan_if_either(double a, double b, double result)
{
    return isnan(a) || isnan(b) ? NAN : result;
}

/* Bits and bytes */

static inline u32 permute_bytes(u32 a, u32 b, u32 selectors)
{
    u64 bytes = (u64)b << 32 | a;
    u32 result = 0;
    for (int i = 0; i < 4; i++) {
        u32 selector = selectors >> (4 * i);
        u8 byte = bytes >> (8 * (selector & 7));
        if (selector & 8)
            byte = byte & 0x80 ? 0xff : 0;
        result |= (u32)byte << (8 * i);
    }
    return result;
}

static inline u32 logic3(u32 a, u32 b, u32 c, u32 table)
{
    u32 result = 0;
    for (int i = 0; i < 8; i++) {
        u32 term = (i & 4 ? a : ~a) & (i & 2 ? b : ~b) & (i & 1 ? c : ~c);
        if (table >> i & 1)
            result |= term;
    }
    return result;
}

static inline u64 reverse_bits(u64 x, u32 width)
{
    u64 result = 0;
    for (u32 i = 0; i < width; i++)
        result |= (x >> i & 1) << (width - 1 - i);
    return result;
}

static inline u64 extract_field(u64 x, u32 start, u32 length, u32 width, bool is_signed)
{
    start &= 255;
    length &= 255;
    u32 top = start + length - 1 < width - 1 ? start + length - 1 : width - 1;
    u64 sign = is_signed && length ? x >> top & 1 : 0;
    u64 result = 0;
    for (u32 i = 0; i < width; i++)
        result |= (i < length && i + start < width ? x >> (i + start) & 1 : sign) << i;
    return result;
}

static inline u64 insert_field(u64 field, u64 base, u32 start, u32 length, u32 width)
{
    start &= 255;
    length &= 255;
    for (u32 i = 0; i < length && i + start < width; i++) {
        base &= ~(1ull << (i + start));
        base |= (field >> i & 1) << (i + start);
    }
    return base;
}
