/* Training steps of DPKL and DBLR, one episode after another, without leaving the cache.

The same steps as `directions` in particle.py with `SpanLayers.move` in layers.py and Adam, where the
equations stand; here each tensor of a few kilobytes is passed over once instead of once per operation.
`compiled.py` compiles this file and calls `run_steps`. Rows of width `d` are multiples of LANES. */

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
#else
#define UNROLLED _Pragma("GCC unroll 6") for
#endif
#define EACH _Pragma("omp simd") for
#define SUM _Pragma("omp simd reduction(+ : sum)") for

typedef float lanes __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int32_t whole __attribute__((vector_size(4 * LANES), aligned(4), may_alias));

typedef struct {
    int64_t episodes, points, layers, width, particles, classes, batch, epochs;
    int64_t frequencies, blocks; /* of random features; 0 and 1 for the closed form */
    int64_t first, until; /* the steps to take: first, ..., until - 1 */
    double learning_rate, momentum, second, epsilon, precision, floor;
    const int64_t *labels, *orders; /* E n; E epochs n */
    const float *kernel, *mean_squares; /* E n n */
    const float *kappa, *scores, *drift; /* E m m, E P P, E P P */
    const float *rows, *columns; /* frequencies: blocks R d, and each block transposed, d R */
    float *values, *direction, *square; /* E n md, E n md, E md */
    float *theta, *theta_mean, *theta_square; /* E PC d */
} Job;

/* Memory of a step. Points are the b·m embeddings of a minibatch, then the K = P·C class weights. */
typedef struct {
    float *unit, *inverse, *gradient; /* points d; points; points d */
    float *cosine, *sine, *phase; /* points R */
    float *mean_cosine, *mean_sine; /* b R */
    float *across, *kernel; /* d K; bm K */
    float *value, *slope, *of_layers, *of_classes; /* b K */
    float *mixed, *move, *weights, *root; /* b md; K d; the larger of b b and P P; md */
    int64_t padded; /* K rounded up to LANES, the length of a row of K */
} Scratch;

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
        BLOCKS(6, VECTORS) BLOCKS(4, VECTORS) BLOCKS(2, VECTORS) BLOCKS(1, VECTORS)
    }
    for (; j < columns; j += LANES) {
        int64_t i = 0;
        BLOCKS(6, 1) BLOCKS(4, 1) BLOCKS(2, 1) BLOCKS(1, 1)
    }
}

static inline float dot(int64_t n, const float *a, const float *b)
{
    float sum = 0;
    SUM (int64_t i = 0; i < n; i++) sum += a[i] * b[i];
    return sum;
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

/* ---- the parts of a step ---- */

/* Rows of `source` (after a ReLU, if asked) scaled to length one, and the inverse of their lengths. */
static void normalise(int64_t rows, int64_t d, const float *source, int relu, float *unit, float *inverse)
{
    for (int64_t i = 0; i < rows; i++, source += d, unit += d) {
        float sum = 0;
        SUM (int64_t j = 0; j < d; j++) {
            float x = relu && source[j] < 0 ? 0 : source[j];
            unit[j] = x;
            sum += x * x;
        }
        inverse[i] = 1 / fmaxf(sqrtf(sum), 1e-12f);
        EACH (int64_t j = 0; j < d; j++) unit[j] *= inverse[i];
    }
}

/* The kernel of b points and K class weights, `value`, and what its logarithm's gradient is multiplied by on its
way back, `slope`. (A constant factor of `value` does not matter.) */
static void closed_form(const Job *job, int64_t b, Scratch *s)
{
    int64_t m = job->layers, d = job->width, k = job->particles * job->classes, padded = s->padded;
    const float *theta = s->unit + b * m * d, precision = job->precision;
    for (int64_t c = 0; c < k; c++)
        for (int64_t j = 0; j < d; j++) s->across[j * padded + c] = theta[c * d + j];
    multiply(b * m, padded, d, s->unit, d, 1, s->across, padded, s->kernel, padded, 0);
    for (int64_t j = 0; j < b * m * padded; j += LANES)
        *(lanes *)(s->kernel + j) = exponential(precision * *(lanes *)(s->kernel + j));
    for (int64_t i = 0; i < b; i++) {
        float *value = s->value + i * padded, *slope = s->slope + i * padded;
        memset(value, 0, padded * sizeof(float));
        for (int64_t l = 0; l < m; l++)
            EACH (int64_t c = 0; c < padded; c++) value[c] += s->kernel[(i * m + l) * padded + c];
        EACH (int64_t c = 0; c < padded; c++) slope[c] = precision / value[c];
    }
}

static void closed_form_backward(const Job *job, int64_t b, Scratch *s)
{
    int64_t m = job->layers, d = job->width, k = job->particles * job->classes, padded = s->padded;
    float *weighted = s->phase; /* bm K */
    for (int side = 0; side < 2; side++) {
        const float *gradient = side ? s->of_classes : s->of_layers;
        for (int64_t i = 0; i < b; i++)
            for (int64_t l = 0; l < m; l++)
                EACH (int64_t c = 0; c < padded; c++)
                    weighted[(i * m + l) * padded + c] =
                        s->kernel[(i * m + l) * padded + c] * gradient[i * padded + c];
        if (side)
            multiply(k, d, b * m, weighted, 1, padded, s->unit, d, s->gradient + b * m * d, d, 0);
        else
            multiply(b * m, d, k, weighted, padded, 1, s->unit + b * m * d, d, s->gradient, d, 0);
    }
}

static void random_features(const Job *job, int64_t b, const float *columns, Scratch *s)
{
    int64_t m = job->layers, d = job->width, k = job->particles * job->classes, r = job->frequencies;
    float floor = job->floor;
    multiply(b * m + k, r, d, s->unit, d, 1, columns, r, s->phase, r, 0);
    for (int64_t j = 0; j < (b * m + k) * r; j += LANES)
        cosine_and_sine(*(lanes *)(s->phase + j), (lanes *)(s->cosine + j), (lanes *)(s->sine + j));
    for (int64_t i = 0; i < b; i++) {
        float *cosine = s->mean_cosine + i * r, *sine = s->mean_sine + i * r;
        const float *of_points = s->cosine + i * m * r, *sines = s->sine + i * m * r;
        EACH (int64_t j = 0; j < r; j++) {
            float c = 0, t = 0;
            for (int64_t l = 0; l < m; l++) c += of_points[l * r + j], t += sines[l * r + j];
            cosine[j] = c / m, sine[j] = t / m;
        }
        for (int64_t c = 0; c < k; c++) {
            int64_t at = (b * m + c) * r;
            float raw = (dot(r, cosine, s->cosine + at) + dot(r, sine, s->sine + at)) / r;
            float raised = fmaxf(raw, floor);
            s->value[i * s->padded + c] = raw > floor ? raw : floor * expf(fmaxf(raw / floor - 1, -87));
            s->slope[i * s->padded + c] = 1 / raised / r;
        }
    }
}

static void random_features_backward(const Job *job, int64_t b, const float *rows, Scratch *s)
{
    int64_t m = job->layers, d = job->width, k = job->particles * job->classes, r = job->frequencies;
    float *phase = s->phase + b * m * r, *cosine = s->cosine + b * m * r, *sine = s->sine + b * m * r;
    float *by_cosine = s->kernel, *by_sine = by_cosine + (k > b ? k : b) * r; /* gradients in the waves */
    multiply(k, r, b, s->of_classes, 1, s->padded, s->mean_cosine, r, by_cosine, r, 0);
    multiply(k, r, b, s->of_classes, 1, s->padded, s->mean_sine, r, by_sine, r, 0);
    EACH (int64_t j = 0; j < k * r; j++) phase[j] = cosine[j] * by_sine[j] - sine[j] * by_cosine[j];
    multiply(b, r, k, s->of_layers, s->padded, 1, cosine, r, by_cosine, r, 0);
    multiply(b, r, k, s->of_layers, s->padded, 1, sine, r, by_sine, r, 0);
    for (int64_t i = 0; i < b; i++)
        for (int64_t l = 0; l < m; l++) {
            int64_t at = (i * m + l) * r;
            EACH (int64_t j = 0; j < r; j++)
                s->phase[at + j] =
                    (s->cosine[at + j] * by_sine[i * r + j] - s->sine[at + j] * by_cosine[i * r + j]) / m;
        }
    multiply(b * m + k, d, r, s->phase, r, 1, rows, d, s->gradient, d, 0);
}

/* From kernel values to the gradients that go back: `of_layers` that of -log mean_p ρ^p, a mean over the
minibatch; `of_classes` that of every particle's own log ρ^p, scaled to all n points. */
static void losses(const Job *job, int64_t b, const int64_t *labels, const int64_t *order, Scratch *s)
{
    int64_t classes = job->classes, particles = job->particles;
    for (int64_t i = 0; i < b; i++) {
        int64_t label = labels[order[i]];
        float *value = s->value + i * s->padded, right = 0;
        for (int64_t p = 0; p < particles; p++) {
            float *rho = value + p * classes, total = 0;
            for (int64_t c = 0; c < classes; c++) total += rho[c];
            for (int64_t c = 0; c < classes; c++) rho[c] /= total;
            right += rho[label];
        }
        for (int64_t p = 0; p < particles; p++) {
            float share = value[p * classes + label] / right; /* of particle p in the mean */
            for (int64_t c = 0; c < classes; c++) {
                int64_t at = i * s->padded + p * classes + c;
                float toward = ((c == label) - s->value[at]) * s->slope[at];
                s->of_layers[at] = -toward * share / b;
                s->of_classes[at] = toward * job->points / b;
            }
        }
    }
}

/* What of the gradients turns their unit vectors; for embeddings, where the ReLU lets it through. */
static void turn(int64_t rows, int64_t d, const float *unit, const float *inverse, int relu, float *gradient)
{
    for (int64_t i = 0; i < rows; i++, unit += d, gradient += d) {
        float along = dot(d, unit, gradient), scale = inverse[i];
        EACH (int64_t j = 0; j < d; j++)
            gradient[j] = relu && unit[j] <= 0 ? 0 : (gradient[j] - along * unit[j]) * scale;
    }
}

/* Adam with v_kj = r_k u_j on the values at all support points, see `SpanLayers`. */
static void move_layers(
    const Job *job, int64_t e, int64_t b, const int64_t *order, int64_t step, const Scratch *s)
{
    int64_t n = job->points, width = job->layers * job->width;
    const float *mean_squares = job->mean_squares + e * n * n, *kernel = job->kernel + e * n * n;
    float *square = job->square + e * width, *root = s->root;
    double correction = 1 - pow(job->second, step), keep = job->momentum;
    float floor = job->epsilon * job->epsilon * correction, fresh = 1 - job->second;
    float rate = job->learning_rate * sqrt(correction) / (1 - pow(keep, step));
    for (int64_t i = 0; i < b; i++)
        for (int64_t k = 0; k <= i; k++) /* symmetric: each pair once */
            s->weights[i * b + k] = (k < i ? 2 : 1) * mean_squares[order[i] * n + order[k]];
    for (int64_t j = 0; j < width; j += LANES) {
        lanes total = {0};
        for (int64_t i = 0; i < b; i++) {
            lanes sum = {0};
            for (int64_t k = 0; k <= i; k++) sum += s->weights[i * b + k] * *(lanes *)(s->mixed + k * width + j);
            total += sum * *(lanes *)(s->mixed + i * width + j);
        }
        *(lanes *)(root + j) = total;
    }
    EACH (int64_t j = 0; j < width; j++) {
        square[j] += fresh * (root[j] - square[j]);
        root[j] = rate / sqrtf(square[j] + floor);
    }
    for (int64_t i = 0; i < n; i++) {
        float *direction = job->direction + (e * n + i) * width, *values = job->values + (e * n + i) * width;
        for (int64_t k = 0; k < b; k++) s->weights[k] = (1 - keep) * kernel[i * n + order[k]];
        for (int64_t j = 0; j < width; j += LANES) {
            lanes moved = (float)keep * *(lanes *)(direction + j);
            for (int64_t k = 0; k < b; k++) moved += s->weights[k] * *(lanes *)(s->mixed + k * width + j);
            *(lanes *)(direction + j) = moved;
            *(lanes *)(values + j) -= *(lanes *)(root + j) * moved;
        }
    }
}

/* SVGD's direction, and Adam along it. */
static void move_classes(const Job *job, int64_t e, int64_t step, const float *gradient, Scratch *s)
{
    int64_t p = job->particles, size = job->classes * job->width, all = p * size;
    float *theta = job->theta + e * all, *mean = job->theta_mean + e * all, *square = job->theta_square + e * all;
    for (int64_t j = 0; j < p * p; j++) s->weights[j] = -job->scores[e * p * p + j];
    multiply(p, size, p, job->drift + e * p * p, p, 1, theta, size, s->move, size, 0);
    multiply(p, size, p, s->weights, p, 1, gradient, size, s->move, size, 1);
    double correction = sqrt(1 - pow(job->second, step));
    float rate = job->learning_rate * correction / (1 - pow(job->momentum, step));
    float floor = job->epsilon * correction, fresh = 1 - job->momentum, fresh_square = 1 - job->second;
    EACH (int64_t j = 0; j < all; j++) {
        mean[j] += fresh * (s->move[j] - mean[j]);
        square[j] += fresh_square * (s->move[j] * s->move[j] - square[j]);
        theta[j] -= rate * mean[j] / (sqrtf(square[j]) + floor);
    }
}

static void take_step(const Job *job, int64_t e, int64_t step, Scratch *s)
{
    int64_t n = job->points, m = job->layers, d = job->width, r = job->frequencies;
    int64_t per_epoch = (n + job->batch - 1) / job->batch, begin = step % per_epoch * job->batch;
    int64_t b = begin + job->batch < n ? job->batch : n - begin, k = job->particles * job->classes;
    const int64_t *order = job->orders + (e * job->epochs + step / per_epoch) * n + begin;
    const float *kappa = job->kappa + e * m * m;
    for (int64_t i = 0; i < b; i++)
        normalise(m, d, job->values + (e * n + order[i]) * m * d, 1, s->unit + i * m * d, s->inverse + i * m);
    normalise(k, d, job->theta + e * k * d, 0, s->unit + b * m * d, s->inverse + b * m);
    int64_t which = (step + 1) % job->blocks * r * d; /* the block of frequencies */
    if (r) random_features(job, b, job->columns + which, s);
    else closed_form(job, b, s);
    losses(job, b, job->labels + e * n, order, s);
    if (r) random_features_backward(job, b, job->rows + which, s);
    else closed_form_backward(job, b, s);
    turn(b * m, d, s->unit, s->inverse, 1, s->gradient);
    turn(k, d, s->unit + b * m * d, s->inverse + b * m, 0, s->gradient + b * m * d);
    for (int64_t i = 0; i < b; i++) /* Algorithm 1 */
        multiply(m, d, m, kappa, m, 1, s->gradient + i * m * d, d, s->mixed + i * m * d, d, 0);
    move_layers(job, e, b, order, step + 1, s);
    move_classes(job, e, step + 1, s->gradient + b * m * d, s);
}

/* Returns 0, or 1 if there is no memory. */
int run_steps(const Job *job)
{
    int64_t b = job->batch < job->points ? job->batch : job->points, m = job->layers, d = job->width;
    int64_t p = job->particles, k = p * job->classes, r = job->frequencies, points = b * m + k;
    int64_t padded = (k + LANES - 1) / LANES * LANES, longer = padded > r ? padded : r;
    Scratch s = {.padded = padded};
    struct { float **part; int64_t size; } parts[] = {
        {&s.unit, points * d}, {&s.inverse, points}, {&s.gradient, points * d}, {&s.cosine, points * r},
        {&s.sine, points * r}, {&s.phase, points * longer}, {&s.mean_cosine, b * r}, {&s.mean_sine, b * r},
        {&s.across, d * padded}, {&s.kernel, 2 * points * longer}, {&s.value, b * padded},
        {&s.slope, b * padded}, {&s.of_layers, b * padded}, {&s.of_classes, b * padded},
        {&s.mixed, b * m * d}, {&s.move, k * d}, {&s.weights, p > b ? p * p : b * b}, {&s.root, m * d},
    };
    int64_t count = sizeof parts / sizeof *parts, total = 0;
    for (int64_t i = 0; i < count; i++) total += (parts[i].size + 15) / 16 * 16; /* of 64 bytes */
    float *memory = aligned_alloc(64, total * sizeof(float)), *next = memory;
    if (!memory) return 1;
    memset(memory, 0, total * sizeof(float)); /* what pads the rows of K stays zero */
    for (int64_t i = 0; i < count; i++) *parts[i].part = next, next += (parts[i].size + 15) / 16 * 16;
    for (int64_t e = 0; e < job->episodes; e++)
        for (int64_t step = job->first; step < job->until; step++) take_step(job, e, step, &s);
    free(memory);
    return 0;
}
