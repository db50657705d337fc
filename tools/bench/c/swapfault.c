/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A job that has more memory than its limit: fills anonymous memory, then reads it back, once from
 * front to end and then at random places, and times what the kernel swaps in.
 *
 *     isw-bench-swapfault --cgroup DIR [--bytes N] [--sweep-ms N] [--touch-ms N]
 *                         [--touches-max N] [--zeros PERCENT]
 *
 * Enters the memory cgroup first. Prints "filled" and waits for a line before it reads, so that
 * what is being written can come to rest.
 */
#define _GNU_SOURCE 1
#include <sys/mman.h>

#include "bench.h"

#define SAMPLES_MAX (1u << 20)
/* A touch that takes less cannot have been a fault that waited for a device. */
#define LOOK_NS 300u

struct job {
	volatile unsigned char *memory;
	uint64_t pages;
	struct bench_samples faults, touches;
	uint64_t sweep_pages, sweep_faults;
	double sweep_s, fill_s, touch_s;
};

static volatile unsigned char *place(const struct job *job, uint64_t page)
{
	return job->memory + page * ISW_PAGE_BYTES;
}

/* The first part of each page is random, the rest zeros: how far it can shrink is then known. */
static void fill(struct job *job, uint64_t zeros_percent)
{
	uint64_t start_ns = iswi_now_ns(), random = 88172645463325252ull;
	uint64_t words[ISW_PAGE_BYTES / 8] = {0};
	size_t used = ISWI_ARRAY_LEN(words) * (100 - zeros_percent) / 100;

	for (uint64_t page = 0; page < job->pages; page++) {
		words[0] = page;
		for (size_t i = 1; i < used; i++)
			words[i] = bench_random(&random);
		memcpy((void *)place(job, page), words, sizeof(words));
	}
	job->fill_s = (double)(iswi_now_ns() - start_ns) / 1e9;
}

static void check(const struct job *job, uint64_t page)
{
	if (*(volatile uint64_t *)place(job, page) != page)
		bench_die("page %llu came back with other bytes", (unsigned long long)page);
}

static void sweep(struct job *job, uint64_t ms)
{
	uint64_t faults = bench_major_faults(), start_ns = iswi_now_ns(), now_ns = start_ns;
	uint64_t page;

	for (page = 0; page < job->pages; page++) {
		check(job, page);
		if (page % 64 == 0) {
			now_ns = iswi_now_ns();
			if (now_ns - start_ns > ms * 1000000)
				break;
		}
	}
	job->sweep_s = (double)(iswi_now_ns() - start_ns) / 1e9;
	job->sweep_pages = page;
	job->sweep_faults = bench_major_faults() - faults;
}

static void touch(struct job *job, uint64_t ms, uint64_t touches_max)
{
	uint64_t random = 0x2545f4914f6cdd1dull, faults = bench_major_faults();
	uint64_t start_ns = iswi_now_ns(), now_ns = start_ns;

	for (uint64_t i = 0; i < touches_max && now_ns - start_ns < ms * 1000000; i++) {
		uint64_t page = bench_random(&random) % job->pages;
		uint64_t before_ns = iswi_now_ns(), took_ns;

		check(job, page);
		now_ns = iswi_now_ns();
		took_ns = now_ns - before_ns;
		bench_samples_add(&job->touches, took_ns);
		if (took_ns > LOOK_NS) {
			uint64_t faults_now = bench_major_faults();

			if (faults_now != faults)
				bench_samples_add(&job->faults, took_ns);
			faults = faults_now;
		}
	}
	job->touch_s = (double)(now_ns - start_ns) / 1e9;
}

static void print(struct job *job)
{
	printf("{\"fill_s\": %.3f, \"sweep_s\": %.4f, \"sweep_pages\": %llu, "
	       "\"sweep_faults\": %llu, \"sweep_mb_s\": %.2f, \"touch_s\": %.3f, ",
	       job->fill_s, job->sweep_s, (unsigned long long)job->sweep_pages,
	       (unsigned long long)job->sweep_faults,
	       (double)job->sweep_pages * ISW_PAGE_BYTES / 1e6 / job->sweep_s, job->touch_s);
	bench_samples_print(&job->faults, "fault_us");
	printf(", ");
	bench_samples_print(&job->touches, "touch_us");
	printf("}\n");
}

int main(int argc, char **argv)
{
	const char *cgroup = bench_option(argc, argv, "cgroup", NULL);
	uint64_t bytes = bench_number(argc, argv, "bytes", 512u << 20);
	uint64_t zeros_percent = bench_number(argc, argv, "zeros", 50);
	struct job job = {.pages = bytes / ISW_PAGE_BYTES};
	char line[16];

	bench_die_with_parent();
	if (!cgroup || !job.pages || zeros_percent > 100)
		bench_die("--cgroup and --bytes are needed, and at most 100 %% of zeros");
	bench_enter(cgroup);
	bench_samples_init(&job.faults, SAMPLES_MAX);
	bench_samples_init(&job.touches, SAMPLES_MAX);
	/* What is measured must not be swapped out itself. */
	(void)mlockall(MCL_CURRENT);
	job.memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	if (job.memory == MAP_FAILED)
		bench_die("no memory");
	/* One page a fault, whatever the host's setting. */
	(void)madvise((void *)job.memory, bytes, MADV_NOHUGEPAGE);
	fill(&job, zeros_percent);
	printf("filled\n");
	fflush(stdout);
	if (read(STDIN_FILENO, line, sizeof(line)) <= 0)
		return 1;
	sweep(&job, bench_number(argc, argv, "sweep-ms", 2000));
	touch(&job, bench_number(argc, argv, "touch-ms", 2000),
	      bench_number(argc, argv, "touches-max", 200000));
	print(&job);
	return 0;
}
