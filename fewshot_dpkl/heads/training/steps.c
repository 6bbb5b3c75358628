/* Training steps of the particle classifiers, one episode after another, without leaving the cache.

The same steps as `particle.py` takes with torch, where the equations stand; here each tensor of a few kilobytes
is passed over once instead of once per operation. `compiled.py` compiles this file, `native.py` calls it.
Widths (`width`, and `features` without a layer) are multiples of LANES: what pads them is zero and stays so. */

#include "forms.h"

/* ---- κ ---- */

static int ascending(const void *a, const void *b)
{
    float x = *(const float *)a, y = *(const float *)b;
    return (x > y) - (x < y);
}

/* From the products of m particles (overwritten): κ, and its bandwidth by the median heuristic, see particles.py. */
static float particle_kernel(int64_t m, int liu_wang, float *products, float *kappa, float *sorted)
{
    if (m == 1) return kappa[0] = 1;
    for (int64_t i = 0; i < m * m; i++) {
        float distance = products[i / m * (m + 1)] + products[i % m * (m + 1)] - 2 * products[i];
        kappa[i] = sorted[i] = i % (m + 1) ? fmaxf(distance, 0) : 0;
    }
    qsort(sorted, m * m, sizeof(float), ascending);
    int64_t first = liu_wang ? 0 : m, count = m * m - first;
    float median = (sorted[first + (count - 1) / 2] + sorted[first + count / 2]) / 2;
    float h = fmaxf(median / logf(liu_wang ? m + 1 : m), 1.0842022e-19f);
    for (int64_t i = 0; i < m * m; i++) kappa[i] = expf(-kappa[i] / h);
    return h;
}

/* Products between the layers, with those that training began from. */
static void layer_products(const Job *job, int64_t e, float *out, Scratch *s)
{
    int64_t m = job->layers, d = job->width, n = job->points, size = n * m * d;
    memset(out, 0, m * m * sizeof(float));
    if (job->layer == FREE) {
        const float *weights = job->moved + e * job->features * m * d;
        gram(job->features, m, d, weights, weights, out);
        return;
    }
    /* W = W₀ + CXᵀB: WᵀW = W₀ᵀW₀ + BᵀT + TᵀB with T = XCW₀ + XC²XᵀB/2 */
    const float *moved = job->moved + e * size;
    float *half = s->weights, *both = s->weights + n * n, *t = s->taken;
    for (int64_t i = 0; i < n * n; i++) half[i] = job->overlap[e * n * n + i] / 2;
    memcpy(t, job->reached + e * size, size * sizeof(float));
    multiply(n, m * d, n, half, n, 1, moved, m * d, t, m * d, 1);
    memset(both, 0, m * m * sizeof(float));
    gram(n, m, d, moved, t, both);
    for (int64_t i = 0; i < m * m; i++)
        out[i] = job->products[e * m * m + i] + both[i] + both[i % m * m + i / m];
}

static void look_at_kernels(const Job *job, int64_t e, Scratch *s)
{
    int64_t m = job->layers, p = job->particles, size = job->classes * job->width;
    float products[p * p], sorted[most(m * m, p * p)], of_layers[m * m];
    const float *theta = job->theta + e * p * size;
    if (job->outside) memcpy(products, job->outside + e * p * p, sizeof products);
    else memset(products, 0, sizeof products);
    gram(1, p, size, theta, theta, products);
    if (job->layer != NONE) {
        layer_products(job, e, of_layers, s);
        if (job->form == PAIRED)
            for (int64_t i = 0; i < p * p; i++) products[i] += of_layers[i];
        else
            particle_kernel(m, job->liu_wang, of_layers, job->kappa + e * m * m, sorted);
    }
    float *scores = job->scores + e * p * p, *drift = job->drift + e * p * p;
    float h = particle_kernel(p, job->liu_wang, products, scores, sorted);
    for (int64_t i = 0; i < p; i++) {
        float sum = 0;
        for (int64_t j = 0; j < p; j++) sum += scores[i * p + j];
        for (int64_t j = 0; j < p; j++) {
            float push = ((i == j ? sum : 0) - scores[i * p + j]) * (2 * job->repulsion / p / h);
            scores[i * p + j] /= p;
            drift[i * p + j] = 2 * job->prior * scores[i * p + j] - push;
        }
    }
    if (job->form == PAIRED)
        for (int64_t i = 0; i < m * m; i++) job->kappa[e * m * m + i] = -scores[i];
}

/* ---- moves ---- */

static inline void adam(
    const Job *job, const Scratch *s, int64_t size, const float *move, float *x, float *mean, float *square)
{
    float fresh = 1 - job->momentum, fresh_square = 1 - job->second;
    for (int64_t j = 0; j < size; j += LANES) {
        lanes g = *(const lanes *)(move + j), m = *(lanes *)(mean + j), v = *(lanes *)(square + j);
        m += fresh * (g - m), v += fresh_square * (g * g - v);
        *(lanes *)(mean + j) = m, *(lanes *)(square + j) = v;
        *(lanes *)(x + j) -= s->rate * over_root(m, v, s->floor);
    }
}

/* Adam with one second moment for each row of width d, in `square`, see `RowAdam`. */
static void adam_by_row(
    const Job *job, const Scratch *s, int64_t rows, int64_t d, float shown, const float *move, float *x, float *mean,
    float *square)
{
    float fresh = 1 - job->momentum, fresh_square = 1 - job->second;
    for (int64_t i = 0; i < rows; i++, move += d, x += d, mean += d) {
        square[i] += fresh_square * (dot(d, move, move) / shown - square[i]);
        float rate = s->rate / (sqrtf(square[i]) + s->floor);
        for (int64_t j = 0; j < d; j += LANES) {
            lanes m = *(lanes *)(mean + j);
            m += fresh * (*(const lanes *)(move + j) - m);
            *(lanes *)(mean + j) = m, *(lanes *)(x + j) -= rate * m;
        }
    }
}

/* Columns of the moves B of the layers along the support points: B -= rate · Q, and while B is at hand, what the layers
make of `rows` points: what they did at the start and `weights` [rows][n] times B. */
static inline __attribute__((always_inline)) void move_columns(
    int rows, int vectors, int64_t n, int64_t width, const float *rates, float *moved, const float *direction,
    const float *const *begun, int64_t j, const float *weights, float *hidden)
{
    lanes rate[VECTORS], sum[6][VECTORS];
    UNROLLED (int v = 0; v < vectors; v++) rate[v] = *(const lanes *)(rates + j + v * LANES);
    UNROLLED (int r = 0; r < rows; r++)
        UNROLLED (int v = 0; v < vectors; v++) sum[r][v] = *(const lanes *)(begun[r] + j + v * LANES);
    for (int64_t i = 0; i < n; i++) {
        lanes b[VECTORS], *at = (lanes *)(moved + i * width + j);
        const lanes *q = (const lanes *)(direction + i * width + j);
        UNROLLED (int v = 0; v < vectors; v++) at[v] = b[v] = at[v] - rate[v] * q[v];
        UNROLLED (int r = 0; r < rows; r++)
            UNROLLED (int v = 0; v < vectors; v++) sum[r][v] += weights[r * n + i] * b[v];
    }
    UNROLLED (int r = 0; r < rows; r++)
        UNROLLED (int v = 0; v < vectors; v++) *(lanes *)(hidden + r * width + j + v * LANES) = sum[r][v];
}

/* B -= rates · Q, and then s->hidden of b points. */
static void move_and_reach(const Job *job, int64_t e, const float *rates, int64_t b, const int64_t *order, Scratch *s)
{
    int64_t n = job->points, width = job->layers * job->width, j = 0;
    float *moved = job->moved + e * n * width;
    const float *direction = job->direction + e * n * width, *begun[6];
    int together = b <= 6;
    for (int64_t i = 0; i < b; i++) {
        const float *of_start = job->begun + (e * n + order[i]) * width;
        memcpy(s->weights + i * n, job->kernel + (e * n + order[i]) * n, n * sizeof(float));
        if (together) begun[i] = of_start;
        else memcpy(s->hidden + i * width, of_start, width * sizeof(float));
    }
#define COLUMNS(rows, vectors) \
    for (; j + vectors * LANES <= width; j += vectors * LANES) \
        move_columns(rows, vectors, n, width, rates, moved, direction, begun, j, s->weights, s->hidden);
#define COLUMNS_OF(rows) \
    case rows: COLUMNS(rows, 2) COLUMNS(rows, 1) break;
    switch (together ? b : 0) {
        COLUMNS_OF(0) COLUMNS_OF(1) COLUMNS_OF(2) COLUMNS_OF(3) COLUMNS_OF(4) COLUMNS_OF(5) COLUMNS_OF(6)
    }
    if (!together) multiply(b, width, n, s->weights, n, 1, moved, width, s->hidden, width, 1);
}

/* Adam with v_kj = r_k u_j on the moves of the layers along the support points, see `SpanLayers`; then s->hidden of the
`next` points, those of the next step. P decays at all points and grows at b of them: it is s->decay · Q, so that Q stays
as it is where P only decays. */
static void move_in_span(
    const Job *job, int64_t e, int64_t b, const int64_t *order, int64_t next, const int64_t *next_order, Scratch *s)
{
    int64_t n = job->points, width = job->layers * job->width;
    const float *overlap = job->overlap + e * n * n;
    float *square = job->square + e * width, *direction = job->direction + e * n * width, *rates = s->move;
    float fresh = 1 - job->second, decay = s->decay *= job->momentum, add = (1 - job->momentum) / decay;
    for (int64_t i = 0; i < b; i++)
        for (int64_t k = 0; k <= i; k++) /* symmetric: each pair once */
            s->weights[i * b + k] = (k < i ? 2 : 1) * overlap[order[i] * n + order[k]] / job->shown[e];
    for (int64_t j = 0; j < width; j += LANES) {
        lanes all = {0}, *u = (lanes *)(square + j);
        for (int64_t i = 0; i < b; i++) {
            lanes sum = {0}, own = *(lanes *)(s->mixed + i * width + j);
            for (int64_t k = 0; k <= i; k++) sum += s->weights[i * b + k] * *(lanes *)(s->mixed + k * width + j);
            all += sum * own;
            *(lanes *)(direction + order[i] * width + j) += add * own;
        }
        *u += fresh * (all - *u);
        *(lanes *)(rates + j) = over_root((lanes){0} + s->rate * decay, *u + s->floor * s->floor, 0);
    }
    move_and_reach(job, e, rates, next, next_order, s);
    if (next && decay > 1e-6f) return;
    for (int64_t j = 0; j < n * width; j += LANES) *(lanes *)(direction + j) *= decay; /* as it is known outside */
    s->decay = 1;
}

/* Adam on all D × md weights, a few rows at a time; a network's also drift. */
static void move_freely(const Job *job, int64_t e, int64_t b, Scratch *s)
{
    int64_t features = job->features, m = job->layers, d = job->width, width = m * d;
    for (int64_t row = 0; row < features; row += 6) {
        int64_t some = least(6, features - row), at = (e * features + row) * width;
        multiply(some, width, b, s->taken + row, 1, features, s->mixed, width, s->move, width, 0);
        for (int64_t i = 0; i < some && job->form == PAIRED; i++)
            multiply(m, d, m, job->drift + e * m * m, m, 1, job->moved + at + i * width, d, s->move + i * width, d, 1);
        adam(job, s, some * width, s->move, job->moved + at, job->direction + at, job->square + at);
    }
}

/* SVGD's direction, and Adam along it. */
static void move_classes(const Job *job, int64_t e, const float *gradient, Scratch *s)
{
    int64_t p = job->particles, size = job->classes * job->width, at = e * p * size;
    for (int64_t j = 0; j < p * p; j++) s->weights[j] = -job->scores[e * p * p + j];
    add_products(p, size, job->drift + e * p * p, job->theta + at, s->weights, gradient, s->move);
    if (job->outside) {
        int64_t k = p * job->classes;
        adam_by_row(job, s, k, job->width, job->shown[e], s->move, job->theta + at, job->theta_mean + at, job->theta_square + e * k);
    } else
        adam(job, s, p * size, s->move, job->theta + at, job->theta_mean + at, job->theta_square + at);
}

/* ---- whole steps ---- */

static void step_with_layers(
    const Job *job, int64_t e, int64_t step, int64_t b, const int64_t *order, int64_t next, const int64_t *next_order,
    Scratch *s)
{
    int64_t n = job->points, m = job->layers, d = job->width, width = m * d, k = job->particles * job->classes;
    float *theta = s->unit + b * width;
    if (job->layer == SPAN) {
        if (step == job->first) { /* later the step before leaves s->hidden behind */
            memset(s->move, 0, width * sizeof(float));
            move_and_reach(job, e, s->move, b, order, s);
        }
    } else {
        int64_t features = job->features;
        for (int64_t i = 0; i < b; i++)
            memcpy(s->taken + i * features, job->inputs + (e * n + order[i]) * features, features * sizeof(float));
        multiply(b, width, features, s->taken, features, 1, job->moved + e * features * width, width, s->hidden, width, 0);
    }
    normalise(b * m, d, s->hidden, 1, job->unit, s->unit, s->inverse);
    normalise(k, d, job->theta + e * k * d, 0, job->unit, theta, s->inverse + b * m);
    int64_t blocks = job->block ? (job->frequencies + job->block - 1) / job->block : 1, which = (step + 1) % blocks;
    int64_t r = least(job->block, job->frequencies - which * job->block), stride = pad(job->block);
    if (job->form == FOURIER) {
        int64_t first = b * m * stride;
        memset(s->value, 0, b * s->padded * sizeof(float));
        waves(job, which, b * m + k, r, stride, s->unit, s->phase, s->cosine, s->sine);
        compare_waves(b, m, k, stride, s->cosine, s->sine, s->cosine + first, s->sine + first, s, s->value);
        for (int64_t c = 0; c < b * s->padded; c++) {
            float raw = s->value[c] / r;
            s->value[c] = bend(raw, job->floor);
            s->slope[c] = 1 / fmaxf(raw, job->floor) / r;
        }
    } else if (job->form == PAIRED)
        paired(job, b, theta, s);
    else
        closed_form(job, b, theta, s);
    losses(job, b, job->labels + e * n, order, s);
    if (job->form == FOURIER) random_features_backward(job, which, b, stride, r, s);
    else if (job->form == PAIRED) paired_backward(job, b, s);
    else closed_form_backward(job, b, s);
    turn(b * m, d, s->unit, s->inverse, 1, job->unit, job->form == FOURIER ? 1.0f / m : 1, s->gradient);
    turn(k, d, theta, s->inverse + b * m, 0, job->unit, 1, s->gradient + b * width);
    for (int64_t i = 0; i < b; i++) /* Algorithm 1 */
        multiply(m, d, m, job->kappa + e * m * m, m, 1, s->gradient + i * width, d, s->mixed + i * width, d, 0);
    if (job->layer == SPAN) move_in_span(job, e, b, order, next, next_order, s);
    else move_freely(job, e, b, s);
    move_classes(job, e, s->gradient + b * width, s);
}

/* Class weights of all D dimensions, in pieces that stay in the cache. With unit class weights t = θ/|θ| the gradient
in θ is (Xᵀa - (a·Xt) t)/|θ|, so what it has along θ joins the drift, a matrix for each class. */
static void step_without_layers(const Job *job, int64_t e, int64_t b, const int64_t *order, Scratch *s)
{
    enum { PIECE = 128 };
    int64_t p = job->particles, classes = job->classes, d = job->width, k = p * classes, n = job->points;
    const float *inputs = job->inputs + e * n * d, *scores = job->scores + e * p * p;
    float *theta = job->theta + e * k * d, *drift = s->mixed, *a = s->of_layers;
    for (int64_t i = 0; i < b; i++) memcpy(s->taken + i * d, inputs + order[i] * d, d * sizeof(float));
    for (int64_t c = 0; c < k; c++) {
        s->inverse[c] = job->unit ? 1 / fmaxf(sqrtf(dot(d, theta + c * d, theta + c * d)), 1e-12f) : 1;
        dots(b, d, theta + c * d, s->taken, s->slope); /* of every point with this class weight */
        for (int64_t i = 0; i < b; i++) s->kernel[i * s->padded + c] = s->slope[i] * s->inverse[c];
    }
    memcpy(s->logs, s->kernel, b * s->padded * sizeof(float));
    from_logs(job, b, s);
    losses(job, b, job->labels + e * n, order, s);
    if (job->outside) { /* coordinates in the span: few, and nothing to scale */
        multiply(k, d, b, s->of_classes, 1, s->padded, s->taken, d, s->gradient, d, 0);
        return move_classes(job, e, s->gradient, s);
    }
    for (int64_t c = 0; c < k; c++) {
        float along = 0;
        for (int64_t i = 0; i < b; i++) along += s->of_classes[i * s->padded + c] * s->kernel[i * s->padded + c];
        s->weights[c] = job->unit ? along * s->inverse[c] * s->inverse[c] : 0;
    }
    for (int64_t c = 0; c < classes; c++)
        for (int64_t i = 0; i < p; i++)
            for (int64_t j = 0; j < p; j++)
                drift[(c * p + i) * p + j] = job->drift[(e * p + i) * p + j] + scores[i * p + j] * s->weights[j * classes + c];
    for (int64_t at = 0; at < b; at++) /* SVGD mixes what the points say to the particles */
        for (int64_t i = 0; i < p; i++)
            for (int64_t c = 0; c < classes; c++) {
                float sum = 0;
                for (int64_t j = 0; j < p; j++)
                    sum -= scores[i * p + j] * s->of_classes[at * s->padded + j * classes + c] * s->inverse[j * classes + c];
                a[at * s->padded + i * classes + c] = sum;
            }
    for (int64_t piece = 0; piece < d; piece += PIECE) {
        int64_t some = least(PIECE, d - piece);
        multiply(k, some, b, a, 1, s->padded, s->taken + piece, d, s->move, PIECE, 0);
        for (int64_t c = 0; c < classes; c++)
            multiply(p, some, p, drift + c * p * p, p, 1, theta + c * d + piece, classes * d, s->move + c * PIECE,
                classes * PIECE, 1);
        for (int64_t c = 0; c < k; c++) {
            int64_t start = (e * k + c) * d + piece;
            adam(job, s, some, s->move + c * PIECE, job->theta + start, job->theta_mean + start, job->theta_square + start);
        }
    }
}

/* The points of a step of episode e, and how many they are. */
static const int64_t *minibatch(const Job *job, int64_t e, int64_t step, int64_t *b)
{
    int64_t n = job->points, per_epoch = (n + job->batch - 1) / job->batch, begin = step % per_epoch * job->batch;
    *b = least(job->batch, n - begin);
    return job->orders + (e * job->epochs + step / per_epoch) * n + begin;
}

/* Returns 0, or 1 if there is no memory. */
int run_steps(const Job *job)
{
    Scratch s;
    float *memory = divide_memory(job, least(job->batch, job->points), &s);
    if (!memory) return 1;
    for (int64_t e = 0; e < job->episodes; e++) {
        s.decay = 1;
        for (int64_t step = job->first; step < job->until; step++) {
            int64_t b, next = 0;
            const int64_t *order = minibatch(job, e, step, &b), *next_order = 0;
            if (step + 1 < job->until) next_order = minibatch(job, e, step + 1, &next);
            double correction = sqrt(1 - pow(job->second, step + 1));
            s.rate = job->learning_rate * correction / (1 - pow(job->momentum, step + 1));
            s.floor = job->epsilon * correction;
            if (step % job->kappa_every == 0) look_at_kernels(job, e, &s);
            if (job->layer == NONE) step_without_layers(job, e, b, order, &s);
            else step_with_layers(job, e, step, b, order, next, next_order, &s);
        }
    }
    free(memory);
    return 0;
}
