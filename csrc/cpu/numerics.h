// The constants of docs/numerics.md, once for C++. src/int8moe/numerics.py states them for Python; a test compares the
// bits.
#pragma once

namespace int8moe {

constexpr float kRintMagic = 12582912.0f;  // 1.5 * 2**23: adding and subtracting it rounds to nearest, ties to even
constexpr float kInt8Max = 127.0f;
constexpr float kAmaxFloor = 1e-30f;

constexpr float kExpLow = -87.0f, kExpHigh = 88.0f;
constexpr float kLog2e = 1.44269504088896341f;
constexpr float kLn2High = 0.693359375f, kLn2Low = -2.12194440e-4f;
constexpr float kExpPolynomial[] = {1.9875691500e-4f, 1.3981999507e-3f, 8.3334519073e-3f,
                                    4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f};

constexpr float kGeluTanhScale = 0.7978845608028654f, kGeluTanhCubic = 0.044715f;
constexpr float kSqrtHalf = 0.7071067811865476f;
constexpr float kErfP = 0.3275911f;
constexpr float kErfPolynomial[] = {1.061405429f, -1.453152027f, 1.421413741f, -0.284496736f, 0.254829592f};

}  // namespace int8moe
