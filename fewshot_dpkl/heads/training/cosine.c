/* Fine-tuning of a cosine classifier by SGD, the steps of `CosineHead`, where the equations stand. */

#include "lanes.h"

/* With momentum, dampening and weight decay as torch has them; the first step has no dampening. */
typedef struct {
    double learning_rate, momentum, dampening, weight_decay, scale;
    int64_t episodes, points, width, classes, epochs, batch;
    const int64_t *labels, *orders; /* E n; E epochs n */
    const float *inputs; /* E n width, a multiple of LANES */
    float *directions, *gains; /* E C width; E C */
} Descent;

static void step(const Descent *job, const float *x, const int64_t *labels, const int64_t *order, int64_t b, int first,
    float *directions, float *gains, float *velocity, float *of_gains, float *cosine)
{
    int64_t classes = job->classes, width = job->width;
    float decay = job->weight_decay, keep = job->momentum, fresh = first ? 1 : 1 - job->dampening, rate = job->learning_rate;
    float inverse[classes], scale = job->scale, along[classes];
    for (int64_t c = 0; c < classes; c++) {
        const float *v = directions + c * width;
        inverse[c] = 1 / greater(sqrtf(dot(width, v, v)), 1e-12f), along[c] = 0;
        for (int64_t i = 0; i < b; i++) cosine[i * classes + c] = dot(width, v, x + order[i] * width) * inverse[c];
    }
    for (int64_t i = 0; i < b; i++) { /* softmax; then cosine holds what is wrong with it */
        float *row = cosine + i * classes, p[classes], greatest = -INFINITY, sum = 0;
        for (int64_t c = 0; c < classes; c++) greatest = greater(greatest, row[c] * scale * gains[c]);
        for (int64_t c = 0; c < classes; c++) sum += p[c] = expf(row[c] * scale * gains[c] - greatest);
        for (int64_t c = 0; c < classes; c++) {
            float residual = (p[c] / sum - (c == labels[order[i]])) * scale / b;
            along[c] += residual * row[c];
            row[c] = residual;
        }
    }
    for (int64_t c = 0; c < classes; c++) {
        float *v = directions + c * width, *moving = velocity + c * width, turned = gains[c] * inverse[c];
        for (int64_t j = 0; j < width; j += LANES) {
            lanes now = *(lanes *)(v + j), gradient = -(inverse[c] * along[c]) * now;
            for (int64_t i = 0; i < b; i++) gradient += cosine[i * classes + c] * *(const lanes *)(x + order[i] * width + j);
            *(lanes *)(moving + j) = keep * *(lanes *)(moving + j) + fresh * (turned * gradient + decay * now);
            *(lanes *)(v + j) = now - rate * *(lanes *)(moving + j);
        }
        of_gains[c] = keep * of_gains[c] + fresh * (along[c] + decay * gains[c]);
        gains[c] -= rate * of_gains[c];
    }
}

/* Returns 0, or 1 if there is no memory. */
int descend_cosines(const Descent *job)
{
    int64_t n = job->points, classes = job->classes, size = classes * job->width;
    float *velocity = malloc((size + classes + job->batch * classes) * sizeof(float));
    if (!velocity) return 1;
    for (int64_t e = 0; e < job->episodes; e++) {
        memset(velocity, 0, (size + classes) * sizeof(float));
        for (int64_t epoch = 0; epoch < job->epochs; epoch++)
            for (int64_t begin = 0; begin < n; begin += job->batch) {
                int64_t left = n - begin, b = left < job->batch ? left : job->batch;
                step(job, job->inputs + e * n * job->width, job->labels + e * n,
                    job->orders + (e * job->epochs + epoch) * n + begin, b, epoch + begin == 0,
                    job->directions + e * size, job->gains + e * classes, velocity, velocity + size, velocity + size + classes);
            }
    }
    return free(velocity), 0;
}
