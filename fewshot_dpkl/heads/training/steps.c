/* Training steps of the particle classifiers, one episode after another, without leaving the cache.

The same steps as `particle.py` takes with torch, where the equations stand; here each tensor of a few kilobytes
is passed over once instead of once per operation. `compiled.py` compiles this file, `native.py` calls it.
Widths (`width`, and `features` without a layer) are multiples of LANES: what pads them is zero and stays so. */

#include "moves.h"

/* ---- κ ---- */

/* The one of n values (reordered) that k others come before in ascending order, by Hoare's FIND. */
static float value_at(int64_t k, int64_t n, float *values)
{
    for (int64_t low = 0, high = n - 1; low < high;) {
        int64_t i = low, j = high;
        for (float pivot = values[k]; i <= j;) {
            while (values[i] < pivot) i++;
            while (values[j] > pivot) j--;
            if (i > j) break;
            float swapped = values[i];
            values[i++] = values[j], values[j--] = swapped;
        }
        if (j < k) low = i;
        if (k < i) high = j;
    }
    return values[k];
}

/* From the products of m particles (overwritten): κ, and its bandwidth by the median heuristic, see particles.py. */
static float particle_kernel(int64_t m, int liu_wang, float *products, float *kappa, float *values)
{
    if (m == 1) return kappa[0] = 1;
    for (int64_t i = 0; i < m * m; i++) {
        float distance = products[i / m * (m + 1)] + products[i % m * (m + 1)] - 2 * products[i];
        kappa[i] = values[i] = i % (m + 1) ? greater(distance, 0) : 0;
    }
    int64_t first = liu_wang ? 0 : m, count = m * m - first; /* zeros of the diagonal come first */
    float median = (value_at(first + (count - 1) / 2, m * m, values) + value_at(first + count / 2, m * m, values)) / 2;
    float h = greater(median / logf(liu_wang ? m + 1 : m), 1.0842022e-19f);
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
        gram(job->features, m, m, d, weights, weights, out);
        return;
    }
    /* W = W₀ + CXᵀB: WᵀW = W₀ᵀW₀ + BᵀT + TᵀB with T = XCW₀ + XC²XᵀB/2 */
    const float *moved = job->moved + e * size;
    float *half = s->weights, *both = s->weights + n * n, *t = s->taken;
    for (int64_t i = 0; i < n * n; i++) half[i] = job->overlap[e * n * n + i] / 2;
    memcpy(t, job->reached + e * size, size * sizeof(float));
    multiply(n, m * d, n, half, n, 1, moved, m * d, t, m * d, 1);
    memset(both, 0, m * m * sizeof(float));
    gram(n, m, m, d, moved, t, both);
    for (int64_t i = 0; i < m * m; i++)
        out[i] = job->products[e * m * m + i] + both[i] + both[i % m * m + i / m];
}

static void look_at_kernels(const Job *job, int64_t e, Scratch *s)
{
    int64_t m = job->layers, p = job->particles, size = job->classes * job->width;
    float products[p * p], values[most(m * m, p * p)], of_layers[m * m];
    const float *theta = job->theta + e * p * size;
    if (job->outside) memcpy(products, job->outside + e * p * p, sizeof products);
    else memset(products, 0, sizeof products);
    gram(1, p, p, size, theta, theta, products);
    if (job->layer != NONE) {
        layer_products(job, e, of_layers, s);
        if (job->form == PAIRED)
            for (int64_t i = 0; i < p * p; i++) products[i] += of_layers[i];
        else
            particle_kernel(m, job->liu_wang, of_layers, job->kappa + e * m * m, values);
    }
    float *scores = job->scores + e * p * p, *drift = job->drift + e * p * p;
    float h = particle_kernel(p, job->liu_wang, products, scores, values);
    float push = p > 1 ? 2 * job->repulsion / p / h : 0; /* one particle has none to push */
    float *spread = job->spread + e * (p + 1), pull = spread[p] = 2 * job->prior + push * p;
    for (int64_t i = 0; i < p; i++) {
        spread[i] = 0;
        for (int64_t j = 0; j < p; j++) spread[i] += push * scores[i * p + j], scores[i * p + j] /= p;
        for (int64_t j = 0; j < p; j++) drift[i * p + j] = pull * scores[i * p + j] - (i == j ? spread[i] : 0);
    }
    if (job->form == PAIRED)
        for (int64_t i = 0; i < m * m; i++) job->kappa[e * m * m + i] = -scores[i];
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
            s->slope[c] = 1 / greater(raw, job->floor) / r;
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
        s->inverse[c] = job->unit ? 1 / greater(sqrtf(dot(d, theta + c * d, theta + c * d)), 1e-12f) : 1;
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
