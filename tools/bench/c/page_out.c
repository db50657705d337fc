/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A job that writes far more memory than its limit, front to end, by one thread or several: how
 * fast it gets its pages out. Then it touches pages at random, at once and after a rest.
 *
 *     isw-bench-page-out --cgroup DIR [--bytes N] [--limit N] [--threads N] [--touch-ms N]
 *
 * Enters the memory cgroup first. Prints "filled" after the first touches and waits for a line
 * before the second ones, so that what is being written can come to rest.
 */
#define _GNU_SOURCE 1
#include <pthread.h>
#include <sys/mman.h>

#include "bench.h"

#define SAMPLES_MAX (1u << 18)
/* A touch that takes less cannot have been a fault that waited for a device. */
#define LOOK_NS     300u
#define THREADS_MAX 64u

struct part {
	pthread_t thread;
	volatile unsigned char *memory;
	uint64_t first, end;
};

static volatile uint64_t *place(volatile unsigned char *memory, uint64_t page)
{
	return (volatile uint64_t *)(memory + page * ISW_PAGE_BYTES);
}

/* Half of each page is random, half zeros: what a compressing device may get is then known. */
static void *fill(void *arg)
{
	const struct part *part = arg;
	uint64_t words[ISW_PAGE_BYTES / 8] = {0}, random = 88172645463325252ull + part->first;

	for (uint64_t page = part->first; page < part->end; page++) {
		words[0] = page;
		for (size_t i = 1; i < ISWI_ARRAY_LEN(words) / 2; i++)
			words[i] = bench_random(&random);
		memcpy((void *)place(part->memory, page), words, sizeof(words));
	}
	return NULL;
}

/* Returns the seconds it took. */
static double fill_all(volatile unsigned char *memory, uint64_t pages, uint64_t threads)
{
	struct part parts[THREADS_MAX];
	uint64_t start_ns = iswi_now_ns();

	for (uint64_t i = 0; i < threads; i++) {
		parts[i] = (struct part){.memory = memory,
					 .first = pages * i / threads,
					 .end = pages * (i + 1) / threads};
		if (pthread_create(&parts[i].thread, NULL, fill, &parts[i]))
			bench_die("no thread");
	}
	for (uint64_t i = 0; i < threads; i++)
		pthread_join(parts[i].thread, NULL);
	return (double)(iswi_now_ns() - start_ns) / 1e9;
}

static void touch(volatile unsigned char *memory, uint64_t pages, uint64_t ms,
		  struct bench_samples *faults)
{
	static uint64_t random = 0x2545f4914f6cdd1dull;
	uint64_t seen = bench_major_faults(), start_ns = iswi_now_ns(), now_ns = start_ns;

	while (now_ns - start_ns < ms * 1000000) {
		uint64_t page = bench_random(&random) % pages, before_ns = iswi_now_ns();

		if (*place(memory, page) != page)
			bench_die("page %llu came back with other bytes", (unsigned long long)page);
		now_ns = iswi_now_ns();
		if (now_ns - before_ns > LOOK_NS && bench_major_faults() != seen) {
			bench_samples_add(faults, now_ns - before_ns);
			seen = bench_major_faults();
		}
	}
}

int main(int argc, char **argv)
{
	const char *cgroup = bench_option(argc, argv, "cgroup", NULL);
	uint64_t bytes = bench_number(argc, argv, "bytes", 4096ull << 20);
	uint64_t limit = bench_number(argc, argv, "limit", 512ull << 20);
	uint64_t threads = bench_number(argc, argv, "threads", 1);
	uint64_t ms = bench_number(argc, argv, "touch-ms", 1000), pages = bytes / ISW_PAGE_BYTES;
	struct bench_samples after, rested;
	volatile unsigned char *memory;
	double fill_s, cpu_s;
	char line[16];

	bench_die_with_parent();
	if (!cgroup || limit >= bytes || !threads || threads > THREADS_MAX)
		bench_die("--cgroup, more --bytes than --limit and 1 to 64 --threads are needed");
	bench_enter(cgroup);
	bench_samples_init(&after, SAMPLES_MAX);
	bench_samples_init(&rested, SAMPLES_MAX);
	/* What is measured must not be swapped out itself. */
	(void)mlockall(MCL_CURRENT);
	memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	if (memory == MAP_FAILED)
		bench_die("no memory");
	/* Page by page, whatever the host's setting. */
	(void)madvise((void *)memory, bytes, MADV_NOHUGEPAGE);
	fill_s = fill_all(memory, pages, threads);
	cpu_s = bench_clock_s(CLOCK_PROCESS_CPUTIME_ID);
	touch(memory, pages, ms, &after);
	printf("filled\n");
	fflush(stdout);
	if (read(STDIN_FILENO, line, sizeof(line)) <= 0)
		return 1;
	touch(memory, pages, ms, &rested);
	printf("{\"fill_s\": %.4f, \"out_mb_s\": %.2f, \"cpu_s\": %.3f, ", fill_s,
	       (double)(bytes - limit) / 1e6 / fill_s, cpu_s);
	bench_samples_print(&after, "after_us");
	printf(", ");
	bench_samples_print(&rested, "rested_us");
	printf("}\n");
	return 0;
}
