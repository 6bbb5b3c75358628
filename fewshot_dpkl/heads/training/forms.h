/* How the particle classifiers compare embeddings with class weights, and the gradients of their losses. */

#include "lanes.h"

enum { CLOSED, FOURIER, DOT, PAIRED }; /* how embeddings and class weights are compared */
enum { NONE, SPAN, FREE }; /* the layers: none, known by their moves along the support points, all weights */

typedef struct {
    int64_t layer, form, unit, episodes, points, features, layers, width, particles, classes, batch, epochs;
    int64_t frequencies, block; /* of random features: all of them, and how many a step looks at */
    int64_t kappa_every, liu_wang, first, until; /* the steps to take: first, ..., until - 1 */
    double learning_rate, momentum, second, epsilon, precision, floor, prior, repulsion;
    const int64_t *labels, *orders; /* E n; E epochs n */
    const float *inputs; /* E n D, NONE and FREE */
    const float *kernel, *overlap, *begun, *reached, *products; /* SPAN: E nn, E nn, E n md twice, E mm */
    const float *outside; /* E PP: products of the parts of class weights that never move, where `theta` is the rest */
    const float *shown; /* E, how many features there are: SPAN, and with `outside` */
    const float *rows, *columns; /* frequencies: blocks of R d, and each block transposed, d R, R padded to LANES ... */
    const float *scales; /* ... or blocks of 4 d, see `rotate` */
    float *moved, *direction, *square; /* SPAN: E n md, E n md, E md; FREE: E D md three times */
    float *theta, *theta_mean, *theta_square; /* E PC d, the last E PC with `outside` */
    float *kappa, *scores, *drift; /* E m m, E P P, E P P: what the last look at the particles gave; drift is ... */
    float *spread; /* ... spread[P]·scores - diag(spread): E P + 1 */
} Job;

/* Memory of a step. Points are the b·m embeddings of a minibatch, then the K = P·C class weights. */
typedef struct {
    float *hidden, *unit, *inverse, *gradient; /* b md; points d; points; points d */
    float *cosine, *sine, *phase, *mean_cosine, *mean_sine; /* points R; points R; points R; b R; b R */
    float *across, *kernel; /* d K; points R or K */
    float *value, *logs, *slope, *of_layers, *of_classes; /* b K */
    float *mixed, *move, *weights, *taken; /* b md; see the moves; numbers of points or particles; b D or n md */
    int64_t padded; /* K rounded up to LANES, the length of a row of K */
    float rate, floor, decay; /* of Adam in this step; see `move_in_span` */
} Scratch;

static int64_t pad(int64_t n) { return (n + 15) / 16 * 16; }
static int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
static int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }

/* ---- embeddings, kernels and their gradients ---- */

/* Rows of `source` (after a ReLU, if asked), scaled to length one if `scale`, and the inverse of their lengths. */
static void normalise(int64_t rows, int64_t d, const float *source, int relu, int scale, float *unit, float *inverse)
{
    if (d == 8 * LANES && scale) { /* a row stays in registers */
        for (int64_t i = 0; i < rows; i++, source += d, unit += d) {
            lanes x[8], sum = {0}, other = {0};
            UNROLLED (int v = 0; v < 8; v++) x[v] = *(const lanes *)(source + v * LANES);
            UNROLLED (int v = 0; v < 8; v++) x[v] = relu ? positive(x[v]) : x[v];
            UNROLLED (int v = 0; v < 8; v += 2) sum += x[v] * x[v], other += x[v + 1] * x[v + 1];
            inverse[i] = 1 / greater(sqrtf(total(sum + other)), 1e-12f);
            UNROLLED (int v = 0; v < 8; v++) *(lanes *)(unit + v * LANES) = x[v] * inverse[i];
        }
        return;
    }
    for (int64_t i = 0; i < rows; i++, source += d, unit += d) {
        lanes sum = {0};
        for (int64_t j = 0; j < d; j += LANES) {
            lanes x = *(const lanes *)(source + j);
            if (relu) x = positive(x);
            *(lanes *)(unit + j) = x;
            sum += x * x;
        }
        inverse[i] = scale ? 1 / greater(sqrtf(total(sum)), 1e-12f) : 1;
        for (int64_t j = 0; j < d && scale; j += LANES) *(lanes *)(unit + j) *= inverse[i];
    }
}

/* For b points and K class weights: `value`, the mean kernel up to a factor that a point and particle share, and
`slope`, by which the gradient of its logarithm is multiplied on its way back. Where it could vanish, `logs` takes its
logarithm. */
static int can_vanish(const Job *job)
{
    return job->form == DOT || job->form == PAIRED || (job->form == CLOSED && job->precision > 16);
}

/* `value` from `logs`, the greatest of each particle's at one */
static void from_logs(const Job *job, int64_t b, Scratch *s)
{
    for (int64_t i = 0; i < b; i++)
        for (int64_t p = 0; p < job->particles; p++) {
            float *logs = s->logs + i * s->padded + p * job->classes, greatest = logs[0];
            for (int64_t c = 1; c < job->classes; c++) greatest = greater(greatest, logs[c]);
            for (int64_t c = 0; c < job->classes; c++)
                s->value[i * s->padded + p * job->classes + c] = expf(logs[c] -= greatest);
        }
}

static void closed_form(const Job *job, int64_t b, const float *theta, Scratch *s)
{
    int64_t m = job->layers, d = job->width, classes = job->classes, k = job->particles * classes, padded = s->padded;
    float precision = job->precision;
    int64_t full = b * m <= 8 ? 0 : k % LANES > 4 ? padded : k - k % LANES; /* columns worth a product of matrices */
    transpose(least(k, full), d, theta, s->across, padded);
    multiply(b * m, full, d, s->unit, d, 1, s->across, padded, s->kernel, padded, 0);
    for (int64_t c = full; c < k; c++) {
        dots(b * m, d, theta + c * d, s->unit, s->phase);
        for (int64_t i = 0; i < b * m; i++) s->kernel[i * padded + c] = s->phase[i];
    }
    for (int64_t i = 0; i < b * m && full < padded; i++) memset(s->kernel + i * padded + k, 0, (padded - k) * sizeof(float));
    for (int64_t i = 0; i < b; i++) {
        float *value = s->value + i * padded, *slope = s->slope + i * padded, *kernel = s->kernel + i * m * padded;
        float *logs = s->logs + i * padded; /* first the greatest of the layers' logarithms */
        memset(value, 0, padded * sizeof(float)), memset(logs, 0, padded * sizeof(float));
        for (int64_t l = 0; l < m && can_vanish(job); l++)
            for (int64_t c = 0; c < padded; c++)
                logs[c] = l ? greater(logs[c], precision * kernel[l * padded + c]) : precision * kernel[c];
        for (int64_t l = 0; l < m; l++)
            for (int64_t c = 0; c < padded; c += LANES) {
                lanes *at = (lanes *)(kernel + l * padded + c);
                *at = exponential(precision * *at - *(lanes *)(logs + c));
                *(lanes *)(value + c) += *at;
            }
        EACH (int64_t c = 0; c < padded; c++) slope[c] = precision / value[c];
        for (int64_t c = 0; c < k && can_vanish(job); c++) logs[c] += logf(value[c]);
    }
    if (can_vanish(job)) from_logs(job, b, s);
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

/* cos and sin of V z for rows z, the r frequencies of block `which` in rows of length `stride`, the rest zero */
static void waves(
    const Job *job, int64_t which, int64_t rows, int64_t r, int64_t stride, const float *z, float *phase,
    float *cosine, float *sine)
{
    int64_t d = job->width;
    if (job->scales) rotate(rows, d, z, job->scales + which * 4 * d, 3, 0, phase);
    else multiply(rows, stride, d, z, d, 1, job->columns + which * d * stride, stride, phase, stride, 0);
    for (int64_t j = 0; j < rows * stride; j += LANES)
        cosine_and_sine(*(lanes *)(phase + j), (lanes *)(cosine + j), (lanes *)(sine + j));
    for (int64_t i = 0; i < rows && r < stride; i++)
        for (int64_t j = r; j < stride; j++) cosine[i * stride + j] = sine[i * stride + j] = 0;
}

static inline __attribute__((always_inline)) void some_waves(
    int count, int64_t stride, const float *cosine, const float *sine, const float *cosines, const float *sines,
    float *value, int64_t next)
{
    lanes sum[5];
    UNROLLED (int i = 0; i < count; i++) sum[i] = (lanes){0};
    for (int64_t j = 0; j < stride; j += LANES) {
        lanes c = *(const lanes *)(cosine + j), t = *(const lanes *)(sine + j);
        UNROLLED (int i = 0; i < count; i++)
            sum[i] += c * *(const lanes *)(cosines + i * stride + j) + t * *(const lanes *)(sines + i * stride + j);
    }
    UNROLLED (int i = 0; i < count; i++) value[i * next] += total(sum[i]);
}

/* value[i][c] += Σ_r of the mean waves of point i times those of class weight c */
static void compare_waves(
    int64_t b, int64_t m, int64_t k, int64_t stride, const float *cosine, const float *sine, const float *of_cosine,
    const float *of_sine, Scratch *s, float *value)
{
    for (int64_t i = 0; i < b; i++) {
        float *mean_cosine = s->mean_cosine + i * stride, *mean_sine = s->mean_sine + i * stride;
        const float *of_points = cosine + i * m * stride, *sines = sine + i * m * stride;
        for (int64_t j = 0; j < stride; j += LANES) {
            lanes c = {0}, t = {0};
            for (int64_t l = 0; l < m; l++)
                c += *(lanes *)(of_points + l * stride + j), t += *(lanes *)(sines + l * stride + j);
            *(lanes *)(mean_cosine + j) = c / (float)m, *(lanes *)(mean_sine + j) = t / (float)m;
        }
    }
    for (int64_t c = 0; c < k; c++) {
        const float *of_c = of_cosine + c * stride, *of_t = of_sine + c * stride;
        int64_t i = 0;
#define SOME_WAVES(count) \
    for (; i + count <= b; i += count) \
        some_waves(count, stride, of_c, of_t, s->mean_cosine + i * stride, s->mean_sine + i * stride, \
            value + i * s->padded + c, s->padded);
        SOME_WAVES(5) SOME_WAVES(1)
    }
}

/* An estimate can be at or below zero: below the floor it is bent into a positive branch. */
static inline float bend(float k, float floor) { return k > floor ? k : floor * expf(greater(k / floor - 1, -80)); }

static void random_features_backward(
    const Job *job, int64_t which, int64_t b, int64_t stride, int64_t r, Scratch *s)
{
    int64_t m = job->layers, d = job->width, k = job->particles * job->classes, first = b * m * stride;
    float *phase = s->phase + first, *cosine = s->cosine + first, *sine = s->sine + first;
    float *by_cosine = s->kernel, *by_sine = by_cosine + most(k, b) * stride; /* gradients in the waves */
    multiply(k, stride, b, s->of_classes, 1, s->padded, s->mean_cosine, stride, by_cosine, stride, 0);
    multiply(k, stride, b, s->of_classes, 1, s->padded, s->mean_sine, stride, by_sine, stride, 0);
    EACH (int64_t j = 0; j < k * stride; j++) phase[j] = cosine[j] * by_sine[j] - sine[j] * by_cosine[j];
    multiply(b, stride, k, s->of_layers, s->padded, 1, cosine, stride, by_cosine, stride, 0);
    multiply(b, stride, k, s->of_layers, s->padded, 1, sine, stride, by_sine, stride, 0);
    for (int64_t i = 0; i < b; i++)
        for (int64_t l = 0; l < m; l++) {
            int64_t at = (i * m + l) * stride;
            EACH (int64_t j = 0; j < stride; j++)
                s->phase[at + j] = s->cosine[at + j] * by_sine[i * stride + j] - s->sine[at + j] * by_cosine[i * stride + j];
        }
    if (job->scales) rotate(b * m + k, d, s->phase, job->scales + which * 4 * d, 3, 1, s->gradient);
    else multiply(b * m + k, d, r, s->phase, stride, 1, job->rows + which * d * stride, d, s->gradient, d, 0);
}

/* A network of its own for each particle: every layer meets its own class weights. */
static void paired(const Job *job, int64_t b, const float *theta, Scratch *s)
{
    int64_t m = job->layers, d = job->width, classes = job->classes;
    for (int64_t i = 0; i < b; i++)
        for (int64_t c = 0; c < m * classes; c++)
            s->logs[i * s->padded + c] = dot(d, s->unit + (i * m + c / classes) * d, theta + c * d);
    from_logs(job, b, s);
}

static void paired_backward(const Job *job, int64_t b, Scratch *s)
{
    int64_t m = job->layers, d = job->width, classes = job->classes;
    for (int64_t l = 0; l < m; l++) {
        int64_t at = (b * m + l * classes) * d;
        multiply(b, d, classes, s->of_layers + l * classes, s->padded, 1, s->unit + at, d, s->gradient + l * d, m * d, 0);
        multiply(classes, d, b, s->of_classes + l * classes, 1, s->padded, s->unit + l * d, m * d, s->gradient + at, d, 0);
    }
}

/* From kernel values to the gradients that go back: `of_classes` that of every particle's own log ρ^p, scaled to
all n points; `of_layers` that of -log mean_p ρ^p, a mean over the minibatch, or for a network the same as the first.
In the mean particle p has the share ρ_y^p / Σ_p' ρ_y^p', by logarithms because ρ_y can vanish. */
static void losses(const Job *job, int64_t b, const int64_t *labels, const int64_t *order, Scratch *s)
{
    int64_t classes = job->classes, particles = job->particles, k = particles * classes;
    int sloped = job->form == CLOSED || job->form == FOURIER, by_logs = can_vanish(job);
    float share[particles], part[k], scale = (float)job->points / b;
    for (int64_t i = 0; i < b; i++) {
        int64_t label = labels[order[i]];
        float *value = s->value + i * s->padded, *slope = s->slope + i * s->padded, all = 0, best = -INFINITY;
        float *of_classes = s->of_classes + i * s->padded, *of_layers = s->of_layers + i * s->padded;
        for (int64_t p = 0; p < particles; p++) {
            float *rho = value + p * classes, sum = 0;
            for (int64_t c = 0; c < classes; c++) sum += rho[c];
            float inverse = 1 / sum;
            for (int64_t c = 0; c < classes; c++) part[p * classes + c] = inverse;
            share[p] = by_logs ? s->logs[i * s->padded + p * classes + label] - logf(sum) : rho[label] * inverse;
            best = greater(best, share[p]);
        }
        EACH (int64_t c = 0; c < k; c++) value[c] *= part[c];
        for (int64_t p = 0; p < particles; p++) all += share[p] = by_logs ? expf(share[p] - best) : share[p];
        float whole = 1 / (all * b);
        for (int64_t p = 0; p < particles; p++)
            for (int64_t c = 0; c < classes; c++) part[p * classes + c] = share[p] * whole;
        EACH (int64_t c = 0; c < k; c++) {
            float toward = -value[c] * (sloped ? slope[c] : 1);
            of_classes[c] = toward * scale, of_layers[c] = -toward * part[c];
        }
        for (int64_t c = label; c < k; c += classes) {
            float toward = (1 - value[c]) * (sloped ? slope[c] : 1);
            of_classes[c] = toward * scale, of_layers[c] = -toward * part[c];
        }
    }
    if (job->form == PAIRED) memcpy(s->of_layers, s->of_classes, b * s->padded * sizeof(float));
}

/* What of the gradients turns their unit vectors; for embeddings, where the ReLU lets it through. */
static void turn(
    int64_t rows, int64_t d, const float *unit, const float *inverse, int relu, int scaled, float factor, float *gradient)
{
    if (d == 8 * LANES && scaled) { /* a row stays in registers */
        for (int64_t i = 0; i < rows; i++, unit += d, gradient += d) {
            lanes z[8], g[8], sum = {0}, other = {0};
            UNROLLED (int v = 0; v < 8; v++) z[v] = *(const lanes *)(unit + v * LANES), g[v] = *(lanes *)(gradient + v * LANES);
            UNROLLED (int v = 0; v < 8; v += 2) sum += z[v] * g[v], other += z[v + 1] * g[v + 1];
            float along = total(sum + other), scale = inverse[i] * factor;
            UNROLLED (int v = 0; v < 8; v++) g[v] = (g[v] - along * z[v]) * scale;
            UNROLLED (int v = 0; v < 8; v++) *(lanes *)(gradient + v * LANES) = relu ? (lanes)((whole)g[v] & (z[v] > 0)) : g[v];
        }
        return;
    }
    for (int64_t i = 0; i < rows; i++, unit += d, gradient += d) {
        float along = scaled ? dot(d, unit, gradient) : 0, scale = inverse[i] * factor;
        for (int64_t j = 0; j < d; j += LANES) {
            lanes z = *(const lanes *)(unit + j), turned = (*(lanes *)(gradient + j) - along * z) * scale;
            *(lanes *)(gradient + j) = relu ? (lanes)((whole)turned & (z > 0)) : turned;
        }
    }
}

static float *divide_memory(const Job *job, int64_t b, Scratch *s)
{
    int64_t m = job->layers, d = job->width, p = job->particles, k = p * job->classes, n = job->points;
    int64_t points = b * m + k, r = pad(job->block), longer = most(pad(k), r), width = m * d;
    int layered = job->layer != NONE;
    s->padded = pad(k);
    struct { float **part; int64_t size; } parts[] = {
        {&s->hidden, layered * b * width}, {&s->unit, layered * points * d}, {&s->inverse, points},
        {&s->gradient, (layered ? points : k * !!job->outside) * d}, {&s->cosine, points * r}, {&s->sine, points * r},
        {&s->phase, points * longer}, {&s->mean_cosine, b * r}, {&s->mean_sine, b * r},
        {&s->across, layered * d * pad(k)}, {&s->kernel, 2 * points * longer}, {&s->value, b * pad(k)}, {&s->logs, b * pad(k)},
        {&s->slope, most(b * pad(k), pad(b))}, {&s->of_layers, b * pad(k)}, {&s->of_classes, b * pad(k)},
        {&s->mixed, most(layered * b * width, job->classes * p * p)}, {&s->move, layered ? most(k * d, 6 * width) : k * most(128, d * !!job->outside)},
        {&s->weights, most(k, most(b * b, b * n)) + (job->layer == SPAN ? n * n + m * m : 0)},
        {&s->taken, most(b * (layered ? job->features : d), job->layer == SPAN ? n * width : 0)},
    };
    int64_t count = sizeof parts / sizeof *parts, total = 0;
    for (int64_t i = 0; i < count; i++) total += pad(parts[i].size); /* of 64 bytes */
    float *memory = aligned_alloc(64, total * sizeof(float)), *next = memory;
    if (!memory) return 0;
    memset(memory, 0, total * sizeof(float)); /* what pads the rows of K stays zero */
    for (int64_t i = 0; i < count; i++) *parts[i].part = next, next += pad(parts[i].size);
    return memory;
}
