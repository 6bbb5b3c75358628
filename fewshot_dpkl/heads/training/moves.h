/* How layers and class weights move along what a minibatch says: Adam, in the span or on all weights, and SVGD. */

#include "forms.h"

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

/* Some columns j of SVGD's direction for the particles i, i + 1, ...: drift·θ - scores·g, by one product. */
static inline __attribute__((always_inline)) void mix_columns(
    int rows, int vectors, const Job *job, int64_t e, const float *gradient, int64_t i, int64_t j, Scratch *s)
{
    int64_t p = job->particles, size = job->classes * job->width, at = e * p * size + j;
    const float *theta = job->theta + at, *scores = job->scores + (e * p + i) * p, *spread = job->spread + e * (p + 1);
    lanes sum[5][VECTORS];
    UNROLLED (int r = 0; r < rows; r++)
        UNROLLED (int v = 0; v < vectors; v++) sum[r][v] = -spread[i + r] * *(const lanes *)(theta + (i + r) * size + v * LANES);
    for (int64_t k = 0; k < p; k++) {
        lanes pulled[VECTORS];
        UNROLLED (int v = 0; v < vectors; v++) {
            int64_t column = k * size + v * LANES;
            pulled[v] = spread[p] * *(const lanes *)(theta + column) - *(const lanes *)(gradient + j + column);
        }
        UNROLLED (int r = 0; r < rows; r++)
            UNROLLED (int v = 0; v < vectors; v++) sum[r][v] += scores[r * p + k] * pulled[v];
    }
    UNROLLED (int r = 0; r < rows; r++)
        UNROLLED (int v = 0; v < vectors; v++) *(lanes *)(s->move + (i + r) * size + j + v * LANES) = sum[r][v];
}

/* SVGD's direction, and Adam along it. */
static void move_classes(const Job *job, int64_t e, const float *gradient, Scratch *s)
{
    int64_t p = job->particles, size = job->classes * job->width, at = e * p * size, k = p * job->classes, j = 0;
#define MIXED(rows, vectors) for (; i + rows <= p; i += rows) mix_columns(rows, vectors, job, e, gradient, i, j, s);
#define MIXED_BY(vectors) \
    for (; j + vectors * LANES <= size; j += vectors * LANES) { \
        int64_t i = 0; \
        MIXED(5, vectors) MIXED(1, vectors) \
    }
    MIXED_BY(VECTORS) MIXED_BY(1)
    if (job->outside)
        adam_by_row(job, s, k, job->width, job->shown[e], s->move, job->theta + at, job->theta_mean + at, job->theta_square + e * k);
    else
        adam(job, s, p * size, s->move, job->theta + at, job->theta_mean + at, job->theta_square + at);
}
