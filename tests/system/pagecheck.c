/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A job that knows every byte of its memory: fills anonymous pages with a pattern of page number,
 * seed and version, changes pages at random, and verifies all of them, again and again.
 *
 *   pagecheck MIB SEED ROUNDS
 *
 * Prints "filled" when all memory is written, "round N" after each round, "wrong PAGE" for each of
 * the first wrong pages, and "ok PAGES" at the end. ROUNDS 0: goes on until SIGTERM or SIGUSR1;
 * after SIGUSR1 it verifies once more and then waits for SIGTERM without touching anything.
 * Exit codes: 0 all right, 1 wrong pages, 2 usage or no memory.
 */
#define _GNU_SOURCE 1
#include <signal.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define PAGE_BYTES      4096u
#define WORDS           (PAGE_BYTES / sizeof(uint64_t))
#define WRONG_SHOWN_MAX 10u

static volatile sig_atomic_t stopping, resting;

static void on_signal(int number)
{
	if (number == SIGUSR1)
		resting = 1;
	else
		stopping = 1;
}

/* splitmix64 (Steele, Lea, Flood 2014): every input bit changes about half of the output bits. */
static uint64_t mix(uint64_t x)
{
	x += 0x9e3779b97f4a7c15ull;
	x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9ull;
	x = (x ^ x >> 27) * 0x94d049bb133111ebull;
	return x ^ x >> 31;
}

struct job {
	uint64_t *memory;
	uint32_t *versions; /* expected; locked, as it must not be at stake itself */
	uint64_t pages, seed, wrong;
};

static void write_page(struct job *job, uint64_t page)
{
	uint64_t *words = job->memory + page * WORDS;
	uint64_t x = mix(job->seed ^ mix(page) ^ (uint64_t)++job->versions[page] << 40);

	for (uint64_t i = 0; i < WORDS; i++)
		words[i] = x = mix(x + i);
}

static void check_page(struct job *job, uint64_t page)
{
	const uint64_t *words = job->memory + page * WORDS;
	uint64_t x = mix(job->seed ^ mix(page) ^ (uint64_t)job->versions[page] << 40);
	uint64_t bad = 0, first = 0;

	for (uint64_t i = 0; i < WORDS; i++) {
		x = mix(x + i);
		if (words[i] != x && !bad++)
			first = words[i];
	}
	if (bad && job->wrong++ < WRONG_SHOWN_MAX)
		printf("wrong %llu: %llu of %zu words, the first is %016llx\n",
		       (unsigned long long)page, (unsigned long long)bad, (size_t)WORDS,
		       (unsigned long long)first);
}

/* Half of the pages at random, every third of them changed; then all in order. */
static void run_round(struct job *job, uint64_t round)
{
	for (uint64_t i = 0; i < job->pages / 2 && !stopping; i++) {
		uint64_t page = mix(job->seed + (round << 32) + i) % job->pages;

		check_page(job, page);
		if (i % 3 == 0)
			write_page(job, page);
	}
	for (uint64_t page = 0; page < job->pages && !stopping; page++)
		check_page(job, page);
}

static int make_job(struct job *job, uint64_t mib)
{
	job->pages = mib * (1024 * 1024 / PAGE_BYTES);
	job->memory = mmap(NULL, job->pages * PAGE_BYTES, PROT_READ | PROT_WRITE,
			   MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	if (job->memory == MAP_FAILED)
		return -1;
	/* Page by page, so that a fault is about one page of ours. */
	madvise(job->memory, job->pages * PAGE_BYTES, MADV_NOHUGEPAGE);
	job->versions = calloc(job->pages, sizeof(*job->versions));
	if (!job->versions || mlock(job->versions, job->pages * sizeof(*job->versions)))
		return -1;
	return 0;
}

int main(int argc, char **argv)
{
	struct job job = {0};
	struct sigaction action = {.sa_handler = on_signal};
	uint64_t rounds;

	if (argc != 4) {
		fprintf(stderr, "usage: pagecheck MIB SEED ROUNDS\n");
		return 2;
	}
	job.seed = mix(strtoull(argv[2], NULL, 10));
	rounds = strtoull(argv[3], NULL, 10);
	if (make_job(&job, strtoull(argv[1], NULL, 10))) {
		perror("pagecheck");
		return 2;
	}
	sigaction(SIGTERM, &action, NULL);
	sigaction(SIGUSR1, &action, NULL);
	setvbuf(stdout, NULL, _IOLBF, 0);
	for (uint64_t page = 0; page < job.pages; page++)
		write_page(&job, page);
	printf("filled\n");
	for (uint64_t round = 1; (!rounds || round <= rounds) && !stopping; round++) {
		run_round(&job, round);
		printf("round %llu\n", (unsigned long long)round);
		if (resting) {
			printf("resting\n");
			while (!stopping)
				pause();
		}
	}
	stopping = 0;
	for (uint64_t page = 0; page < job.pages; page++)
		check_page(&job, page);
	if (job.wrong) {
		printf("%llu pages are wrong\n", (unsigned long long)job.wrong);
		return 1;
	}
	printf("ok %llu\n", (unsigned long long)job.pages);
	return 0;
}
