/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A job that swaps all the time, and counts what it gets done in every slice of time: for what
 * happens to a consumer when something happens to its donors.
 *
 *     isw-bench-timeline --cgroup DIR [--bytes N] [--run-ms N] [--slice-ms N] [--calm-ms N]
 *                        [--write-percent N] [--seed N]
 *
 * Enters the memory cgroup, fills its memory and prints "filled". After a line of input it warms
 * up for a moment, prints "running NS" (CLOCK_MONOTONIC) and touches pages at random, each of which
 * it checks, and of which it changes some. The first --calm-ms it works a quarter of the time only.
 */
#define _GNU_SOURCE 1
#include <sys/mman.h>

#include "bench.h"

#define SAMPLES_MAX (1u << 20)
#define SLICES_MAX  65536u
#define WARM_MS     500u
#define CALM_SHARE  4u
/* A touch that takes less cannot have been a fault that waited for a device. */
#define LOOK_NS 300u

struct job {
	volatile uint64_t *memory;
	uint64_t pages, write_percent, random;
	uint64_t slice_ns, slices;
	uint32_t ops[SLICES_MAX];
	struct bench_samples faults;
};

/* The page's number below, how often it was written above. */
static volatile uint64_t *place(const struct job *job, uint64_t page)
{
	return job->memory + page * (ISW_PAGE_BYTES / sizeof(uint64_t));
}

static void fill(struct job *job)
{
	uint64_t words[ISW_PAGE_BYTES / 8] = {0};

	for (uint64_t page = 0; page < job->pages; page++) {
		words[0] = page;
		for (size_t i = 1; i < ISWI_ARRAY_LEN(words) / 2; i++)
			words[i] = bench_random(&job->random);
		memcpy((void *)place(job, page), words, sizeof(words));
	}
}

/* Returns the time after it. */
static uint64_t touch(struct job *job, uint64_t before_ns, bool counted)
{
	uint64_t chance = bench_random(&job->random), page = chance % job->pages;
	uint64_t faults = counted ? bench_major_faults() : 0, now_ns;
	volatile uint64_t *word = place(job, page);
	uint64_t value = *word;

	if ((value & 0xffffffffu) != page)
		bench_die("page %llu came back with other bytes", (unsigned long long)page);
	if ((chance >> 40) % 100 < job->write_percent)
		*word = value + (1ull << 32);
	now_ns = iswi_now_ns();
	if (counted && now_ns - before_ns > LOOK_NS && bench_major_faults() != faults)
		bench_samples_add(&job->faults, now_ns - before_ns);
	return now_ns;
}

static void run(struct job *job, uint64_t start_ns, uint64_t calm_ns)
{
	uint64_t now_ns = start_ns, slice = 0;

	while ((slice = (now_ns - start_ns) / job->slice_ns) < job->slices) {
		uint64_t into_ns = (now_ns - start_ns) % job->slice_ns;

		if (slice * job->slice_ns < calm_ns && into_ns > job->slice_ns / CALM_SHARE) {
			struct timespec rest = {.tv_nsec = (long)(job->slice_ns - into_ns)};

			nanosleep(&rest, NULL);
			now_ns = iswi_now_ns();
			continue;
		}
		now_ns = touch(job, now_ns, true);
		/* It counts where it began: one that waited for long is no work of later. */
		job->ops[slice]++;
	}
}

static void print(struct job *job, uint64_t start_ns)
{
	printf("{\"start_ns\": %llu, \"slice_ms\": %llu, \"ops\": [", (unsigned long long)start_ns,
	       (unsigned long long)(job->slice_ns / 1000000));
	for (uint64_t i = 0; i < job->slices; i++)
		printf("%s%u", i ? ", " : "", job->ops[i]);
	printf("], ");
	bench_samples_print(&job->faults, "fault_us");
	printf("}\n");
}

int main(int argc, char **argv)
{
	const char *cgroup = bench_option(argc, argv, "cgroup", NULL);
	uint64_t bytes = bench_number(argc, argv, "bytes", 256u << 20);
	uint64_t slice_ms = bench_number(argc, argv, "slice-ms", 100);
	uint64_t run_ms = bench_number(argc, argv, "run-ms", 8000);
	static struct job job;
	uint64_t now_ns, warm_ns;
	char line[16];

	bench_die_with_parent();
	job.pages = bytes / ISW_PAGE_BYTES;
	job.write_percent = bench_number(argc, argv, "write-percent", 20);
	job.random = 88172645463325252ull ^ bench_number(argc, argv, "seed", 1);
	if (!cgroup || !job.pages || !slice_ms || run_ms / slice_ms > SLICES_MAX)
		bench_die("--cgroup, --bytes and a sane --run-ms and --slice-ms are needed");
	job.slice_ns = slice_ms * 1000000;
	job.slices = run_ms / slice_ms;
	bench_enter(cgroup);
	bench_samples_init(&job.faults, SAMPLES_MAX);
	/* What is measured must not be swapped out itself. */
	(void)mlockall(MCL_CURRENT);
	job.memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	if (job.memory == MAP_FAILED)
		bench_die("no memory");
	/* One page a fault, whatever the host's setting. */
	(void)madvise((void *)job.memory, bytes, MADV_NOHUGEPAGE);
	fill(&job);
	printf("filled\n");
	fflush(stdout);
	if (read(STDIN_FILENO, line, sizeof(line)) <= 0)
		return 1;
	for (now_ns = warm_ns = iswi_now_ns(); now_ns - warm_ns < WARM_MS * 1000000ull;)
		now_ns = touch(&job, now_ns, false);
	printf("running %llu\n", (unsigned long long)now_ns);
	fflush(stdout);
	run(&job, now_ns, bench_number(argc, argv, "calm-ms", 0) * 1000000);
	print(&job, now_ns);
	return 0;
}
