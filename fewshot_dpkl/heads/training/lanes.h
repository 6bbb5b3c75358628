/* Products of small matrices and elementary functions, on all lanes of a vector register at once. */

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#ifdef __AVX512F__
#define LANES 16
#define VECTORS 4 /* of a block of a product: 6 x 4 sums fill the registers */
#else
#define LANES 8
#define VECTORS 2
#endif
#ifdef __clang__
#define UNROLLED _Pragma("unroll") for
#define UNROLLED16 _Pragma("unroll") for
#else
#define UNROLLED _Pragma("GCC unroll 8") for
#define UNROLLED16 _Pragma("GCC unroll 16") for
#endif
#define EACH _Pragma("omp simd") for
#define SUM _Pragma("omp simd reduction(+ : sum)") for

#ifdef __AVX512F__
#include <immintrin.h>
#endif

typedef float lanes __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int32_t whole __attribute__((vector_size(4 * LANES), aligned(4), may_alias));

/* ---- products ---- */

static inline __attribute__((always_inline)) void block(
    int rows, int vectors, int64_t depth, const float *a, int64_t a_row, int64_t a_column, const float *b,
    int64_t b_row, float *out, int64_t out_row, int add)
{
    lanes sum[6][VECTORS];
    UNROLLED (int i = 0; i < rows; i++)
        UNROLLED (int v = 0; v < vectors; v++)
            sum[i][v] = add ? *(lanes *)(out + i * out_row + v * LANES) : (lanes){0};
    for (int64_t k = 0; k < depth; k++) {
        lanes right[VECTORS];
        UNROLLED (int v = 0; v < vectors; v++) right[v] = *(const lanes *)(b + k * b_row + v * LANES);
        UNROLLED (int i = 0; i < rows; i++) {
            float left = a[i * a_row + k * a_column];
            UNROLLED (int v = 0; v < vectors; v++) sum[i][v] += left * right[v];
        }
    }
    UNROLLED (int i = 0; i < rows; i++)
        UNROLLED (int v = 0; v < vectors; v++) *(lanes *)(out + i * out_row + v * LANES) = sum[i][v];
}

/* out[i][j] = (or += if add) Σ_k a[i·a_row + k·a_column] b[k][j]; columns is a multiple of LANES. */
static void multiply(
    int64_t rows, int64_t columns, int64_t depth, const float *a, int64_t a_row, int64_t a_column,
    const float *b, int64_t b_row, float *out, int64_t out_row, int add)
{
#define BLOCKS(height, vectors) \
    for (; i + height <= rows; i += height) \
        block(height, vectors, depth, a + i * a_row, a_row, a_column, b + j, b_row, out + i * out_row + j, out_row, add);
    int64_t j = 0;
    for (; j + VECTORS * LANES <= columns; j += VECTORS * LANES) {
        int64_t i = 0;
        BLOCKS(6, VECTORS) BLOCKS(5, VECTORS) BLOCKS(4, VECTORS) BLOCKS(2, VECTORS) BLOCKS(1, VECTORS)
    }
    if (VECTORS > 3 && j + 3 * LANES == columns) {
        int64_t i = 0;
        BLOCKS(6, 3) BLOCKS(5, 3) BLOCKS(4, 3) BLOCKS(2, 3) BLOCKS(1, 3)
        return;
    }
    for (; j < columns; j += LANES) {
        int64_t i = 0;
        BLOCKS(6, 1) BLOCKS(5, 1) BLOCKS(4, 1) BLOCKS(2, 1) BLOCKS(1, 1)
    }
}

static inline float greater(float a, float b) { return a > b ? a : b; } /* fmaxf would be a call */

static inline float total(lanes x)
{
#ifdef __AVX512F__
    return _mm512_reduce_add_ps((__m512)x);
#else
    float sum = 0;
    for (int i = 0; i < LANES; i++) sum += x[i];
    return sum;
#endif
}

static inline float dot(int64_t d, const float *a, const float *b) /* d is a multiple of LANES */
{
    lanes sum = {0}, other = {0};
    int64_t j = 0;
    for (; j + 2 * LANES <= d; j += 2 * LANES) {
        sum += *(const lanes *)(a + j) * *(const lanes *)(b + j);
        other += *(const lanes *)(a + j + LANES) * *(const lanes *)(b + j + LANES);
    }
    if (j < d) sum += *(const lanes *)(a + j) * *(const lanes *)(b + j);
    return total(sum + other);
}

static inline __attribute__((always_inline)) void some_dots(
    int count, int64_t d, const float *row, const float *others, float *out)
{
    lanes sum[8];
    UNROLLED (int i = 0; i < count; i++) sum[i] = (lanes){0};
    for (int64_t j = 0; j < d; j += LANES) {
        lanes left = *(const lanes *)(row + j);
        UNROLLED (int i = 0; i < count; i++) sum[i] += left * *(const lanes *)(others + i * d + j);
    }
    UNROLLED (int i = 0; i < count; i++) out[i] = total(sum[i]);
}

/* out[i] = row·others[i], for b rows of width d, a multiple of LANES */
static void dots(int64_t b, int64_t d, const float *row, const float *others, float *out)
{
    int64_t i = 0;
    for (; i + 8 <= b; i += 8) some_dots(8, d, row, others + i * d, out + i);
    for (; i + 5 <= b; i += 5) some_dots(5, d, row, others + i * d, out + i);
    for (; i + 2 <= b; i += 2) some_dots(2, d, row, others + i * d, out + i);
    for (; i < b; i++) some_dots(1, d, row, others + i * d, out + i);
}

/* ---- elementary functions, on all lanes at once ---- */

#define ROUNDER 12582912.0f /* 1.5·2²³: adding it leaves no room for a fraction */

static inline lanes choose(whole mask, lanes yes, lanes no)
{
    return (lanes)((mask & (whole)yes) | (~mask & (whole)no));
}

/* exp(x), x < 88; below -87 as there */
static inline lanes exponential(lanes x)
{
    x = choose(x < -87.0f, x * 0 - 87.0f, x);
    lanes shifted = x * 1.44269504f + ROUNDER, twos = shifted - ROUNDER;
    lanes r = x - twos * 0.693359375f + twos * 2.12194440e-4f; /* log 2 in two parts */
    lanes p = 1 + r * (1 + r * (0.5f + r * (1 / 6.0f + r * (1 / 24.0f + r * (1 / 120.0f + r * (1 / 720.0f))))));
    return p * (lanes)(((whole)shifted + 127) << 23);
}

static inline void cosine_and_sine(lanes x, lanes *cosine, lanes *sine)
{
    lanes shifted = x * 0.636619772f + ROUNDER, quarters = shifted - ROUNDER;
    lanes r = x - quarters * 1.5703125f - quarters * 4.83751297e-4f - quarters * 7.54978942e-8f; /* π/2 */
    lanes q = r * r;
    lanes s = r * (1 + q * (-1 / 6.0f + q * (1 / 120.0f + q * (-1 / 5040.0f + q * (1 / 362880.0f)))));
    lanes c = 1 + q * (-0.5f + q * (1 / 24.0f + q * (-1 / 720.0f + q * (1 / 40320.0f))));
    whole turns = (whole)shifted, odd = -(turns & 1);
    *cosine = (lanes)((whole)choose(odd, s, c) ^ ((turns + 1) & 2) << 30);
    *sine = (lanes)((whole)choose(odd, c, s) ^ (turns & 2) << 30);
}

static inline lanes positive(lanes x) { return (lanes)((whole)x & (x > 0)); }

/* mean / (√square + floor) */
static inline lanes over_root(lanes mean, lanes square, float floor)
{
#ifdef __AVX512F__ /* estimates and a step of Newton's: a third of the time of a root and a division */
    lanes inverse = (lanes)_mm512_rsqrt14_ps((__m512)(square + 1e-37f));
    inverse *= 1.5f - 0.5f * square * inverse * inverse;
    if (floor == 0) return mean * inverse; /* known when compiled */
    lanes divisor = square * inverse + floor, estimate = (lanes)_mm512_rcp14_ps((__m512)divisor);
    return mean * (estimate * (2 - divisor * estimate));
#else
    lanes root;
    for (int i = 0; i < LANES; i++) root[i] = sqrtf(square[i]);
    return mean / (root + floor);
#endif
}

#if defined(__has_builtin)
#if __has_builtin(__builtin_shufflevector)
#define SHUFFLES
#endif
#endif

/* ---- products with random rotations ---- */

#if defined(SHUFFLES) && LANES == 16
#define PARTNERS(h) \
    0 ^ h, 1 ^ h, 2 ^ h, 3 ^ h, 4 ^ h, 5 ^ h, 6 ^ h, 7 ^ h, 8 ^ h, 9 ^ h, 10 ^ h, 11 ^ h, 12 ^ h, 13 ^ h, 14 ^ h, 15 ^ h
#elif defined(SHUFFLES)
#define PARTNERS(h) 0 ^ h, 1 ^ h, 2 ^ h, 3 ^ h, 4 ^ h, 5 ^ h, 6 ^ h, 7 ^ h
#endif
#ifdef SHUFFLES
#define PARTNER(x, h) __builtin_shufflevector(x, x, PARTNERS(h))
#else
static inline lanes partner(lanes x, int h)
{
    lanes y;
    for (int i = 0; i < LANES; i++) y[i] = x[i ^ h];
    return y;
}
#define PARTNER(x, h) partner(x, h)
#endif

/* Sums and differences of lanes, and of vectors, that are h apart */
#define INSIDE(h) \
    { \
        lanes sign; \
        UNROLLED16 (int i = 0; i < LANES; i++) sign[i] = i & h ? -1 : 1; \
        UNROLLED16 (int i = 0; i < count; i++) v[i] = PARTNER(v[i], h) + sign * v[i]; \
    }
#define ACROSS(h) \
    UNROLLED16 (int i = 0; i < count; i++) \
        if (!(i & h)) { \
            lanes sum = v[i] + v[i + h]; \
            v[i + h] = v[i] - v[i + h], v[i] = sum; \
        }

/* `count` vectors at once, 1 or more rows of `vectors` */
static inline __attribute__((always_inline)) void rotate_some(
    int count, int vectors, int turns, const float *rows, const float *scales, int64_t next, float *out)
{
    lanes v[16];
    UNROLLED16 (int i = 0; i < count; i++)
        v[i] = *(const lanes *)(rows + i * LANES) * *(const lanes *)(scales + i % vectors * LANES);
    for (int turn = 0; turn < turns; turn++) {
        scales += next;
        INSIDE(1) INSIDE(2) INSIDE(4)
#if LANES == 16
        INSIDE(8)
#endif
        if (vectors > 1) ACROSS(1)
        if (vectors > 2) ACROSS(2)
        if (vectors > 4) ACROSS(4)
        if (vectors > 8) ACROSS(8)
        UNROLLED16 (int i = 0; i < count; i++) v[i] *= *(const lanes *)(scales + i % vectors * LANES);
    }
    UNROLLED16 (int i = 0; i < count; i++) *(lanes *)(out + i * LANES) = v[i];
}

/* Rows x of width d, LANES to 16·LANES and a power of two, to S₃HS₂HS₁HS₀x for 3 turns, H being Hadamard's matrix and
S_i the diagonal `scales` [turns + 1][d]; if `back`, to the transpose of this times x. */
static void rotate(int64_t rows, int64_t d, const float *x, const float *scales, int turns, int back, float *out)
{
    int64_t next = back ? -d : d, i = 0;
    if (back) scales += turns * d;
#define ROWS_OF(vectors) \
    case vectors: \
        for (; i + 16 / vectors <= rows; i += 16 / vectors) \
            rotate_some(16, vectors, turns, x + i * d, scales, next, out + i * d); \
        for (; i < rows; i++) rotate_some(vectors, vectors, turns, x + i * d, scales, next, out + i * d); \
        break;
    switch (d / LANES) { ROWS_OF(1) ROWS_OF(2) ROWS_OF(4) ROWS_OF(8) ROWS_OF(16) }
}

/* out[j][c] = in[c][j] for `count` rows of width d, out in rows of length `stride` */
static void transpose(int64_t count, int64_t d, const float *in, float *out, int64_t stride)
{
    int64_t c = 0;
#if LANES == 16 && defined(SHUFFLES)
#define LOW(s, c) ((c) & (s) ? 16 + (c) - (s) : (c))
#define HIGH(s, c) ((c) & (s) ? 16 + (c) : (c) + (s))
#define ALL(f, s) \
    f(s, 0), f(s, 1), f(s, 2), f(s, 3), f(s, 4), f(s, 5), f(s, 6), f(s, 7), f(s, 8), f(s, 9), f(s, 10), f(s, 11), \
        f(s, 12), f(s, 13), f(s, 14), f(s, 15)
#define SWAP(s) \
    UNROLLED16 (int i = 0; i < 16; i++) \
        if (!(i & s)) { \
            lanes a = row[i], b = row[i + s]; \
            row[i] = __builtin_shufflevector(a, b, ALL(LOW, s)); \
            row[i + s] = __builtin_shufflevector(a, b, ALL(HIGH, s)); \
        }
    for (; c + 16 <= count; c += 16)
        for (int64_t j = 0; j < d; j += 16) {
            lanes row[16];
            UNROLLED16 (int i = 0; i < 16; i++) row[i] = *(const lanes *)(in + (c + i) * d + j);
            SWAP(8) SWAP(4) SWAP(2) SWAP(1)
            UNROLLED16 (int i = 0; i < 16; i++) *(lanes *)(out + (j + i) * stride + c) = row[i];
        }
#endif
    for (; c < count; c++)
        for (int64_t j = 0; j < d; j++) out[j * stride + c] = in[c * d + j];
}

/* ---- products between the m and k vectors of width d that make up every row ---- */

static inline __attribute__((always_inline)) void tile(
    int high, int wide, int64_t rows, int64_t m, int64_t k, int64_t d, const float *x, const float *y, float *out)
{
    lanes sum[5][5];
    UNROLLED (int a = 0; a < high; a++) UNROLLED (int b = 0; b < wide; b++) sum[a][b] = (lanes){0};
    for (int64_t row = 0; row < rows; row++, x += m * d, y += k * d)
        for (int64_t j = 0; j < d; j += LANES) {
            lanes right[5];
            UNROLLED (int b = 0; b < wide; b++) right[b] = *(const lanes *)(y + b * d + j);
            UNROLLED (int a = 0; a < high; a++) {
                lanes left = *(const lanes *)(x + a * d + j);
                UNROLLED (int b = 0; b < wide; b++) sum[a][b] += left * right[b];
            }
        }
    for (int a = 0; a < high; a++)
        for (int b = 0; b < wide; b++)
            out[a * k + b] += total(sum[a][b]);
}

/* out[a][b] += Σ_rows x[row][a]·y[row][b], m times k; d is a multiple of LANES. */
static void gram(int64_t rows, int64_t m, int64_t k, int64_t d, const float *x, const float *y, float *out)
{
    int64_t a = 0;
#define TILES(high, wide) \
    for (; b + wide <= k; b += wide) tile(high, wide, rows, m, k, d, x + a * d, y + b * d, out + a * k + b);
    for (; a + 5 <= m; a += 5) {
        int64_t b = 0;
        TILES(5, 5) TILES(5, 1)
    }
    for (; a < m; a++) {
        int64_t b = 0;
        TILES(1, 5) TILES(1, 1)
    }
}
