/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A job with one large piece of memory: writes it in order, reads it in order, touches its pages at
 * random, then unmaps half of it and starts programs.
 *
 *     isw-bench-memory-job [--bytes N] [--touch-ms N] [--calls N]
 *
 * It knows nothing of limits or swap. Every byte that it reads is verified. Prints one line of JSON
 * with rates, waiting times in microseconds, and in `check` the sum of all words.
 */
#define _GNU_SOURCE 1
#include <spawn.h>
#include <sys/mman.h>
#include <sys/wait.h>

#include "bench.h"

#define WORDS_PER_PAGE (ISW_PAGE_BYTES / sizeof(uint64_t))
/* One waiting time is taken for so much read or written in order. */
#define PIECE_WORDS (16 * WORDS_PER_PAGE)
#define SAMPLES_MAX (1u << 19)
#define PASSES      2

extern char **environ;

struct timed {
	struct bench_samples waits;
	double seconds;
};

/* Not allocated: an allocation as large as that might leave memory like the job's own. */
static uint32_t samples_[3][SAMPLES_MAX];

static void timed_init(struct timed *timed, uint32_t *storage)
{
	*timed = (struct timed){.waits = {.ns = storage, .max = SAMPLES_MAX}};
	memset(storage, 0xff, SAMPLES_MAX * sizeof(*storage));
}

static uint64_t word_at(uint64_t index)
{
	return (index + 1) * 0x9e3779b97f4a7c15ull;
}

static void write_in_order(uint64_t *memory, uint64_t words, struct timed *timed)
{
	uint64_t start_ns = iswi_now_ns(), before_ns = start_ns, now_ns;

	for (uint64_t first = 0; first < words; first += PIECE_WORDS) {
		for (uint64_t i = first; i < first + PIECE_WORDS; i++)
			memory[i] = word_at(i);
		now_ns = iswi_now_ns();
		bench_samples_add(&timed->waits, now_ns - before_ns);
		before_ns = now_ns;
	}
	timed->seconds = (double)(before_ns - start_ns) / 1e9;
}

/* Returns the sum of all words. */
static uint64_t read_in_order(const uint64_t *memory, uint64_t words, struct timed *timed)
{
	uint64_t sum = 0, start_ns = iswi_now_ns(), before_ns = start_ns, now_ns;

	for (uint64_t pass = 0; pass < PASSES; pass++)
		for (uint64_t first = 0; first < words; first += PIECE_WORDS) {
			uint64_t wrong = 0;

			for (uint64_t i = first; i < first + PIECE_WORDS; i++) {
				wrong |= memory[i] ^ word_at(i);
				sum += memory[i];
			}
			if (wrong)
				bench_die("wrong bytes between word %llu and %llu",
					  (unsigned long long)first,
					  (unsigned long long)(first + PIECE_WORDS));
			now_ns = iswi_now_ns();
			bench_samples_add(&timed->waits, now_ns - before_ns);
			before_ns = now_ns;
		}
	timed->seconds = (double)(before_ns - start_ns) / 1e9;
	return sum;
}

static void touch(const volatile uint64_t *memory, uint64_t words, uint64_t ms, struct timed *timed)
{
	uint64_t random = 0x2545f4914f6cdd1dull, start_ns = iswi_now_ns(), before_ns = start_ns;

	while (before_ns - start_ns < ms * 1000000) {
		uint64_t index = bench_random(&random) % words, now_ns;

		if (memory[index] != word_at(index))
			bench_die("wrong bytes at word %llu", (unsigned long long)index);
		now_ns = iswi_now_ns();
		bench_samples_add(&timed->waits, now_ns - before_ns);
		before_ns = now_ns;
	}
	timed->seconds = (double)(before_ns - start_ns) / 1e9;
}

/* ------------------------------------------------------------------------------- calls */

static void await_success(pid_t pid)
{
	int status;

	if (waitpid(pid, &status, 0) != pid || status)
		bench_die("/bin/true failed");
}

static void spawn_true(void)
{
	char *argv[] = {"true", NULL};
	pid_t pid;

	if (posix_spawn(&pid, "/bin/true", NULL, NULL, argv, environ))
		bench_die("/bin/true cannot be started");
	await_success(pid);
}

static void fork_true(void)
{
	pid_t pid = fork();

	if (pid < 0)
		bench_die("no process");
	if (!pid) {
		execl("/bin/true", "true", (char *)NULL);
		_exit(127);
	}
	await_success(pid);
}

/* Milliseconds of a call, on average. */
static double calls_ms(void (*call)(void), uint64_t calls)
{
	uint64_t start_ns = iswi_now_ns();

	for (uint64_t i = 0; i < calls; i++)
		call();
	return (double)(iswi_now_ns() - start_ns) / 1e6 / (double)calls;
}

/* The first fork comes last but for the others: it may bring all that has left back. */
static void call_all(uint64_t *memory, uint64_t bytes, uint64_t calls)
{
	uint64_t start_ns;
	double munmap_ms;

	printf(", \"spawn_ms\": %.4f", calls_ms(spawn_true, calls));
	start_ns = iswi_now_ns();
	if (munmap((char *)memory + bytes / 2, bytes / 2))
		bench_die("half of the memory cannot be unmapped");
	munmap_ms = (double)(iswi_now_ns() - start_ns) / 1e6;
	printf(", \"munmap_ms\": %.4f", munmap_ms);
	printf(", \"first_fork_ms\": %.4f", calls_ms(fork_true, 1));
	printf(", \"fork_ms\": %.4f", calls_ms(fork_true, calls));
}

static void print(const char *name, struct timed *timed, double per_s)
{
	printf(", \"%s_per_s\": %.3f, ", name, per_s);
	bench_samples_print(&timed->waits, name);
}

int main(int argc, char **argv)
{
	uint64_t bytes = bench_number(argc, argv, "bytes", 1ull << 30);
	uint64_t ms = bench_number(argc, argv, "touch-ms", 0);
	uint64_t calls = bench_number(argc, argv, "calls", 0);
	uint64_t words, sum, *memory;
	void *volatile first;
	struct timed write, read, touched;

	bytes -= bytes % (2 * PIECE_WORDS * sizeof(uint64_t));
	words = bytes / sizeof(uint64_t);
	if (!words)
		bench_die("--bytes is too little");
	timed_init(&write, samples_[0]);
	timed_init(&read, samples_[1]);
	timed_init(&touched, samples_[2]);
	/* In most programs an allocator has served something large before the first mapping. */
	first = malloc(8 * PIECE_WORDS * sizeof(uint64_t));
	free(first);
	memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	if (memory == MAP_FAILED)
		bench_die("no memory");
	write_in_order(memory, words, &write);
	sum = read_in_order(memory, words, &read);
	printf("{\"check\": {\"sum\": \"%llu\"}", (unsigned long long)sum);
	print("write", &write, (double)bytes / 1e6 / write.seconds);
	print("read", &read, PASSES * (double)bytes / 1e6 / read.seconds);
	if (ms) {
		touch(memory, words, ms, &touched);
		print("touch", &touched, (double)touched.waits.count / touched.seconds);
	}
	if (calls)
		call_all(memory, bytes, calls);
	printf("}\n");
	return 0;
}
