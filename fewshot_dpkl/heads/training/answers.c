/* What comes before and after training: the random start of the layers, and answers to queries. */

#include "forms.h"

/* out [E][rows][columns] = a [E][rows][depth] · b [E][depth][columns], plus `onto` if there is one; columns is a
multiple of LANES. */
void products(
    int64_t episodes, int64_t rows, int64_t columns, int64_t depth, const float *a, const float *b, const float *onto,
    float *out)
{
    int64_t size = rows * columns;
    for (int64_t e = 0; e < episodes; e++, a += rows * depth, b += depth * columns, out += size) {
        if (onto) memcpy(out, onto + e * size, size * sizeof(float));
        multiply(rows, columns, depth, a, depth, 1, b, columns, out, columns, !!onto);
    }
}

/* out [E][m][k] = a [E][m][width] · bᵀ, b being [E][k][width]; width is a multiple of LANES. */
void products_of_rows(
    int64_t episodes, int64_t m, int64_t k, int64_t width, const float *a, const float *b, float *out)
{
    memset(out, 0, episodes * m * k * sizeof(float));
    for (int64_t e = 0; e < episodes; e++) gram(1, m, k, width, a + e * m * width, b + e * k * width, out + e * m * k);
}

/* numpy's SFC64 */
static inline uint64_t next_bits(uint64_t *s)
{
    uint64_t bits = s[0] + s[1] + s[3]++;
    s[0] = s[1] ^ (s[1] >> 11);
    s[1] = s[2] + (s[2] << 3);
    s[2] = ((s[2] << 24) | (s[2] >> 40)) + bits;
    return bits;
}

/* out [rows][m][d] = a [rows][features] · W₀, and products [m][m] = W₀ᵀW₀, of layers W₀ [features][m][d] that
`sign_weights` in draws.py draws from this stream: each is Hadamard's matrix again and again, every row with a random
sign. So a point is folded to d sums of its features with these signs, and H turns the sums. */
int through_signs(
    const uint64_t *generator, int64_t features, int64_t m, int64_t d, double scale, int64_t rows, const float *a,
    float *out, float *products)
{
    int64_t wide = (features + d - 1) / d * d;
    uint64_t state[4] = {generator[0], generator[1], generator[2], generator[3]}, bits = 0;
    float *signs = aligned_alloc(64, pad(m * wide + wide + 2 * d) * sizeof(float)), *x = signs + m * wide, *scales = x + wide;
    if (!signs) return 1;
    memset(signs, 0, (m + 1) * wide * sizeof(float));
    for (int64_t i = 0; i < m * features; i++) {
        bits = i % 64 ? bits >> 1 : next_bits(state);
        signs[i / features * wide + i % features] = 1 - 2 * (float)(bits & 1);
    }
    for (int64_t j = 0; j < d; j++) scales[j] = 1, scales[d + j] = scale;
    for (int64_t i = 0; i < rows; i++, out += m * d) {
        memcpy(x, a + i * features, features * sizeof(float));
        for (int64_t l = 0; l < m; l++)
            for (int64_t j = 0; j < d; j += LANES) {
                lanes sum = {0};
                for (int64_t k = j; k < wide; k += d) sum += *(lanes *)(x + k) * *(lanes *)(signs + l * wide + k);
                *(lanes *)(out + l * d + j) = sum;
            }
        rotate(m, d, out, scales, 1, 0, out);
    }
    for (int64_t i = 0; i < m * m && products; i++)
        products[i] = scale * scale * d * dot(wide, signs + i / m * wide, signs + i % m * wide);
    return free(signs), 0;
}

static void write_logs(const Job *job, int64_t b, const Scratch *s, float *out)
{
    int64_t classes = job->classes;
    for (int64_t i = 0; i < b; i++)
        for (int64_t p = 0; p < job->particles; p++, out += classes) {
            const float *value = s->value + i * s->padded + p * classes, *logs = s->logs + i * s->padded + p * classes;
            float sum = 0;
            for (int64_t c = 0; c < classes; c++) sum += value[c];
            for (int64_t c = 0; c < classes; c++)
                out[c] = can_vanish(job) ? logs[c] - logf(sum) : logf(value[c] / sum);
        }
}

static int answer_by_waves(const Job *job, int64_t rows, int64_t b, const float *z, const float *theta, Scratch *s, float *out)
{
    int64_t m = job->layers, d = job->width, k = job->particles * job->classes, stride = pad(job->block), r = job->frequencies;
    float *values = calloc(rows * s->padded, sizeof(float)), *cosine = s->cosine + b * m * stride;
    float *sine = s->sine + b * m * stride;
    if (!values) return 1;
    for (int64_t which = 0; which * job->block < r; which++) {
        int64_t some = least(job->block, r - which * job->block);
        waves(job, which, k, some, stride, theta, s->phase, cosine, sine);
        for (int64_t i = 0; i < rows; i += b) {
            int64_t now = least(b, rows - i);
            waves(job, which, now * m, some, stride, z + i * m * d, s->phase, s->cosine, s->sine);
            compare_waves(now, m, k, stride, s->cosine, s->sine, cosine, sine, s, values + i * s->padded);
        }
    }
    for (int64_t i = 0; i < rows; i++) {
        for (int64_t c = 0; c < k; c++) s->value[c] = bend(values[i * s->padded + c] / r, job->floor);
        write_logs(job, 1, s, out + i * k);
    }
    free(values);
    return 0;
}

/* log ρ [E][rows][P][C] of points. `hidden` is [E][rows][m][d], what the layers make of the points, overwritten; or
[E][rows][d], the points themselves. Returns 1 if there is no memory. */
int answer(const Job *job, int64_t rows, float *hidden, float *out)
{
    int64_t m = job->layers, d = job->width, k = job->particles * job->classes, b = least(rows, 8);
    Scratch s;
    float *memory = divide_memory(job, b, &s), inverse[most(k, 8 * m)], *theta = malloc(k * d * sizeof(float));
    if (!memory || !theta) return free(memory), free(theta), 1;
    int failed = 0;
    for (int64_t e = 0; e < job->episodes && !failed; e++, hidden += rows * m * d, out += rows * k) {
        normalise(k, d, job->theta + e * k * d, 0, job->unit, theta, inverse);
        for (int64_t i = 0; i < rows && job->layer != NONE; i += 8)
            normalise(least(8, rows - i) * m, d, hidden + i * m * d, 1, job->unit, hidden + i * m * d, inverse);
        if (job->form == FOURIER) failed = answer_by_waves(job, rows, b, hidden, theta, &s, out);
        else
            for (int64_t i = 0; i < rows; i += b) {
                int64_t now = least(b, rows - i);
                s.unit = hidden + i * m * d;
                if (job->layer == NONE) {
                    for (int64_t c = 0; c < k; c++) {
                        dots(now, d, theta + c * d, s.unit, s.slope);
                        for (int64_t j = 0; j < now; j++) s.logs[j * s.padded + c] = s.slope[j];
                    }
                    from_logs(job, now, &s);
                } else if (job->form == PAIRED) paired(job, now, theta, &s);
                else closed_form(job, now, theta, &s);
                write_logs(job, now, &s, out + i * k);
            }
    }
    free(memory), free(theta);
    return failed;
}

/* log p [rows][C] = log mean_p exp(log ρ [rows][P][C]) */
void log_means(int64_t rows, int64_t particles, int64_t classes, const float *logs, float *out)
{
    for (int64_t i = 0; i < rows; i++, logs += particles * classes, out += classes)
        for (int64_t c = 0; c < classes; c++) {
            float greatest = -3e38f, sum = 0; /* not -INFINITY: less itself it is no number */
            for (int64_t p = 0; p < particles; p++) greatest = greater(greatest, logs[p * classes + c]);
            for (int64_t p = 0; p < particles; p++) sum += expf(logs[p * classes + c] - greatest);
            out[c] = greatest + logf(sum / particles);
        }
}
