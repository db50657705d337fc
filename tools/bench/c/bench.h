/* SPDX-License-Identifier: Apache-2.0 */
/* What the benchmark programs share. Each prints one line of JSON; exit status 0 or 1. */
#ifndef ISW_BENCH_H
#define ISW_BENCH_H

#include <signal.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <time.h>
#include <unistd.h>

#include "util/util.h"

#define BENCH_UNUSED_OK __attribute__((unused))

BENCH_UNUSED_OK static void bench_die(const char *format, ...)
	__attribute__((noreturn, format(printf, 1, 2)));
BENCH_UNUSED_OK static void bench_die(const char *format, ...)
{
	va_list args;

	va_start(args, format);
	vfprintf(stderr, format, args);
	va_end(args);
	fputc('\n', stderr);
	exit(1);
}

/* A benchmark that is killed must not leave programs behind. */
BENCH_UNUSED_OK static void bench_die_with_parent(void)
{
	prctl(PR_SET_PDEATHSIG, SIGKILL);
}

/* ---------------------------------------------------------------------- options */

/* The value of `--name value`, or fallback. */
BENCH_UNUSED_OK static const char *bench_option(int argc, char **argv, const char *name,
						const char *fallback)
{
	for (int i = 1; i + 1 < argc; i++)
		if (strncmp(argv[i], "--", 2) == 0 && strcmp(argv[i] + 2, name) == 0)
			return argv[i + 1];
	return fallback;
}

BENCH_UNUSED_OK static uint64_t bench_number(int argc, char **argv, const char *name,
					     uint64_t fallback)
{
	const char *text = bench_option(argc, argv, name, NULL);
	char *end;
	uint64_t value;

	if (!text)
		return fallback;
	value = strtoull(text, &end, 10);
	if (end == text || *end)
		bench_die("--%s %s: not a number", name, text);
	return value;
}

/* ---------------------------------------------------------------------- samples */

/* Durations in nanoseconds; what does not fit any more is only counted. */
struct bench_samples {
	uint32_t *ns;
	uint64_t used, max;
	double sum_ns;
	uint64_t count, longest_ns;
};

BENCH_UNUSED_OK static void bench_samples_init(struct bench_samples *s, uint64_t max)
{
	*s = (struct bench_samples){.max = max};
	s->ns = calloc(max, sizeof(*s->ns));
	if (!s->ns)
		bench_die("no memory for %llu samples", (unsigned long long)max);
	/* Faulted in now, not while measuring. */
	memset(s->ns, 0xff, max * sizeof(*s->ns));
}

static inline void bench_samples_add(struct bench_samples *s, uint64_t ns)
{
	s->sum_ns += (double)ns;
	s->count++;
	s->longest_ns = ISWI_MAX(s->longest_ns, ns);
	if (s->used < s->max)
		s->ns[s->used++] = (uint32_t)ISWI_MIN(ns, (uint64_t)UINT32_MAX);
}

BENCH_UNUSED_OK static int bench_compare_(const void *a, const void *b)
{
	uint32_t x = *(const uint32_t *)a, y = *(const uint32_t *)b;

	return x < y ? -1 : x > y;
}

/* "name": {"count": ..., "mean": ..., "p50": ..., ...}, microseconds. */
BENCH_UNUSED_OK static void bench_samples_print(struct bench_samples *s, const char *name)
{
	static const struct {
		const char *name;
		double quantile;
	} quantiles[] = {{"p50", .5}, {"p90", .9}, {"p99", .99}, {"p999", .999}};

	qsort(s->ns, s->used, sizeof(*s->ns), bench_compare_);
	printf("\"%s\": {\"count\": %llu, \"mean\": %.3f", name, (unsigned long long)s->count,
	       s->count ? s->sum_ns / (double)s->count / 1e3 : 0);
	for (size_t i = 0; i < ISWI_ARRAY_LEN(quantiles); i++) {
		uint64_t at = (uint64_t)(quantiles[i].quantile * (double)s->used);

		printf(", \"%s\": %.3f", quantiles[i].name,
		       s->used ? s->ns[ISWI_MIN(at, s->used - 1)] / 1e3 : 0);
	}
	printf(", \"max\": %.3f}", (double)s->longest_ns / 1e3);
}

/* --------------------------------------------------------------------- processors */

BENCH_UNUSED_OK static double bench_clock_s(clockid_t clock)
{
	struct timespec t;

	return clock_gettime(clock, &t) ? 0 : (double)t.tv_sec + (double)t.tv_nsec / 1e9;
}

/* Processor time of another process so far; 0 for pid 0. */
BENCH_UNUSED_OK static double bench_cpu_of(uint64_t pid)
{
	clockid_t clock;

	if (!pid || clock_getcpuclockid((pid_t)pid, &clock))
		return 0;
	return bench_clock_s(clock);
}

struct bench_host {
	double softirq_s;
	double kernel_s; /* with irq and softirq */
	double busy_s;   /* of all processors, with everything but idling */
};

/* What this host's processors have done so far, in ticks of the kernel (10 ms). */
BENCH_UNUSED_OK static struct bench_host bench_host_times(void)
{
	unsigned long long t[8]; /* user, nice, system, idle, iowait, irq, softirq, steal */
	double tick_s = 1.0 / (double)sysconf(_SC_CLK_TCK);
	FILE *file = fopen("/proc/stat", "r");

	if (!file || fscanf(file, "cpu %llu %llu %llu %llu %llu %llu %llu %llu", &t[0], &t[1],
			    &t[2], &t[3], &t[4], &t[5], &t[6], &t[7]) != 8)
		bench_die("/proc/stat cannot be read");
	fclose(file);
	return (struct bench_host){
		.softirq_s = (double)t[6] * tick_s,
		.kernel_s = (double)(t[2] + t[5] + t[6]) * tick_s,
		.busy_s = (double)(t[0] + t[1] + t[2] + t[5] + t[6]) * tick_s,
	};
}

/* --------------------------------------------------------------------------- jobs */

/* Moves this process into a memory cgroup. */
BENCH_UNUSED_OK static void bench_enter(const char *cgroup)
{
	char path[4096];
	FILE *file;

	snprintf(path, sizeof(path), "%s/cgroup.procs", cgroup);
	file = fopen(path, "w");
	if (!file || fprintf(file, "%d\n", getpid()) < 0 || fclose(file))
		bench_die("%s: cannot be entered", cgroup);
}

/* Of this thread. */
BENCH_UNUSED_OK static uint64_t bench_major_faults(void)
{
	struct rusage usage;

	getrusage(RUSAGE_THREAD, &usage);
	return (uint64_t)usage.ru_majflt;
}

/* ------------------------------------------------------------------------- chance */

static inline uint64_t bench_random(uint64_t *state)
{
	/* xorshift64*: Vigna, "An experimental exploration of Marsaglia's xorshift generators". */
	*state ^= *state >> 12;
	*state ^= *state << 25;
	*state ^= *state >> 27;
	return *state * 0x2545f4914f6cdd1dull;
}

#endif
