/* Runs the attention kernel on arrays of exactly the size it is told, for a sanitizer to watch. */

#include <stdio.h>
#include KERNEL

/* Images, tokens, heads, width of a head. */
static const long SHAPES[][4] = {
    {1, 1, 1, 16},  {2, 5, 2, 16},   {3, 17, 1, 48}, {2, 48, 3, 32}, {1, 49, 2, 64},  {2, 65, 3, 64},
    {1, 97, 2, 64}, {1, 130, 2, 80}, {1, 7, 1, 128}, {2, 16, 1, 16}, {1, 96, 1, 112},
};

static float *numbers(long count) {
    float *all = malloc(count * sizeof(float));
    for (long i = 0; i < count; i++) all[i] = (float)(i * 7919 % 1000) / 500 - 1;
    return all;
}

int main(void) {
    const int count = sizeof SHAPES / sizeof SHAPES[0];
    for (int i = 0; i < count; i++) {
        const long images = SHAPES[i][0], tokens = SHAPES[i][1], heads = SHAPES[i][2], width = SHAPES[i][3];
        const long size = images * tokens * heads * width;
        float *qkv = numbers(3 * size), *y = numbers(size), *sums = numbers(images * heads * tokens);
        float *grad = numbers(size), *grad_qkv = numbers(3 * size);
        if (attention_forward(qkv, y, sums, images, tokens, heads, width, 1)) return 1;
        if (attention_backward(grad, qkv, y, sums, grad_qkv, images, tokens, heads, width, 1)) return 1;
        /* The first token attends to all, the others in two groups. */
        int *members = malloc(tokens * sizeof(int)), *starts = malloc(3 * sizeof(int));
        for (int prefix = 0; prefix < 2 && prefix < tokens; prefix++) {
            const int rest = tokens - prefix;
            for (int j = 0; j < rest; j++) members[j] = prefix + (j * 2 < rest ? rest - 1 - j : j - (rest + 1) / 2);
            starts[0] = 0, starts[1] = (rest + 1) / 2, starts[2] = rest;
            const int count = rest > 1 ? 2 : 1;
            if (grouped_attention_forward(qkv, y, sums, members, starts, count, prefix, images, tokens, heads, width, 1))
                return 1;
            if (grouped_attention_backward(grad, qkv, y, sums, grad_qkv, members, starts, count, prefix, images, tokens,
                                           heads, width, 1))
                return 1;
        }
        free(members), free(starts);
        free(qkv), free(y), free(sums), free(grad), free(grad_qkv);
    }
    printf("all shapes\n");
    return 0;
}
