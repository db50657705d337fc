/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A job for the agent: uses large memory in many ways and knows what must be in it. Run by
 * test_far_job.c with the agent preloaded; without sanitizers, which bring an allocator of their
 * own.
 *
 *     far_job CASE [NUMBER]
 *
 * Exits with 0, or 1 after a line that says what was wrong.
 */
#define _GNU_SOURCE 1
#include <errno.h>
#include <fcntl.h>
#include <malloc.h>
#include <pthread.h>
#include <signal.h>
#include <spawn.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "check.h"

#define PAGE    4096u
#define MIB     (1u << 20)
#define BUFFERS 12u
#define THREADS 3u

extern char **environ;

/* ------------------------------------------------------------------- a model */

enum kind { MALLOC, CALLOC, MMAP, MEMALIGN, KINDS };

/* Page i begins with tag[i] and ends with it; 0: the page is zeros. */
struct buffer {
	unsigned char *at;
	uint32_t pages;
	enum kind kind;
	uint64_t *tags;
};

struct worker {
	uint64_t random;
	uint32_t operations;
	struct buffer buffers[BUFFERS];
	pthread_t thread;
};

static uint64_t draw(struct worker *w) /* xorshift64* */
{
	w->random ^= w->random >> 12;
	w->random ^= w->random << 25;
	w->random ^= w->random >> 27;
	return w->random * 2685821657736338717ull;
}

static uint32_t below(struct worker *w, uint32_t limit)
{
	return (uint32_t)((draw(w) >> 33) % limit);
}

static void write_page(struct buffer *b, uint32_t page, uint64_t tag)
{
	unsigned char *at = b->at + (size_t)page * PAGE;

	memcpy(at, &tag, 8);
	memcpy(at + PAGE - 8, &tag, 8);
	b->tags[page] = tag;
}

static void check_page(const struct buffer *b, uint32_t page, const char *when)
{
	const unsigned char *at = b->at + (size_t)page * PAGE;
	uint64_t head, tail;

	memcpy(&head, at, 8);
	memcpy(&tail, at + PAGE - 8, 8);
	if (head == b->tags[page] && tail == b->tags[page])
		return;
	fprintf(stderr, "%s: page %u of %u of kind %d: %llx and %llx, not %llx\n", when, page,
		b->pages, (int)b->kind, (unsigned long long)head, (unsigned long long)tail,
		(unsigned long long)b->tags[page]);
	exit(1);
}

static void check_all(const struct buffer *b, const char *when)
{
	for (uint32_t page = 0; page < b->pages; page++)
		check_page(b, page, when);
}

static void make(struct worker *w, struct buffer *b, uint32_t pages)
{
	size_t bytes = (size_t)pages * PAGE;

	b->kind = (enum kind)below(w, KINDS);
	b->pages = pages;
	b->tags = calloc(pages, sizeof(*b->tags)); /* small enough to be the allocator's own */
	switch (b->kind) {
	case MALLOC:
		b->at = malloc(bytes);
		break;
	case CALLOC:
		b->at = calloc(pages, PAGE);
		break;
	case MEMALIGN:
		b->at = memalign(PAGE << below(w, 4), bytes);
		break;
	default:
		b->at = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1,
			     0);
		CHECK(b->at != MAP_FAILED);
	}
	CHECK(b->at != NULL && b->tags != NULL);
	for (uint32_t page = 0; page < pages; page++) {
		if (b->kind == MMAP || b->kind == CALLOC) /* zeros, unless it is written now */
			if (below(w, 4) == 0)
				continue;
		write_page(b, page, draw(w) | 1);
	}
	if (b->kind == MMAP || b->kind == CALLOC)
		check_all(b, "new");
}

static void end(struct buffer *b)
{
	check_all(b, "before its end");
	if (b->kind == MMAP)
		CHECK_EQ(munmap(b->at, (size_t)b->pages * PAGE), 0);
	else
		free(b->at);
	free(b->tags);
	*b = (struct buffer){.at = NULL};
}

static uint64_t *more_tags(struct buffer *b, uint32_t pages)
{
	uint64_t *tags = calloc(pages, sizeof(*tags));

	CHECK(tags != NULL);
	memcpy(tags, b->tags, (pages < b->pages ? pages : b->pages) * sizeof(*tags));
	free(b->tags);
	return tags;
}

static void resize(struct worker *w, struct buffer *b)
{
	uint32_t pages = 64 + below(w, 2000), before = b->pages;
	void *at;

	if (b->kind == MMAP)
		at = mremap(b->at, (size_t)before * PAGE, (size_t)pages * PAGE, MREMAP_MAYMOVE);
	else
		at = realloc(b->at, (size_t)pages * PAGE);
	CHECK(at != MAP_FAILED && at != NULL);
	b->tags = more_tags(b, pages);
	b->at = at;
	b->pages = pages;
	if (b->kind != MMAP)
		for (uint32_t page = before; page < pages; page++)
			write_page(b, page, draw(w) | 1);
}

/* By a call that the agent sees, or by one that it does not. */
static void discard(struct worker *w, struct buffer *b)
{
	uint32_t first = below(w, b->pages), pages = 1 + below(w, b->pages - first);
	unsigned char *at = b->at + (size_t)first * PAGE;

	if ((uintptr_t)at % PAGE != 0)
		return;
	if (below(w, 2))
		CHECK_EQ(madvise(at, (size_t)pages * PAGE, MADV_DONTNEED), 0);
	else
		CHECK_EQ(syscall(SYS_madvise, at, (size_t)pages * PAGE, MADV_DONTNEED), 0);
	memset(b->tags + first, 0, pages * sizeof(*b->tags));
	for (uint32_t page = first; page < first + pages; page++) {
		if (below(w, 3) == 0)
			check_page(b, page, "discarded");
		if (below(w, 2))
			write_page(b, page, draw(w) | 1);
	}
}

/* The kernel writes and reads memory that may be absent. */
static void through_the_kernel(struct worker *w, struct buffer *b)
{
	uint32_t page = below(w, b->pages);
	uint64_t tag = draw(w) | 1;
	int pipe_fds[2];

	CHECK_EQ(pipe(pipe_fds), 0);
	CHECK_EQ(write(pipe_fds[1], b->at + (size_t)page * PAGE, 8), 8);
	CHECK_EQ(read(pipe_fds[0], &tag, 8), 8);
	CHECK_EQ(tag, b->tags[page]);
	tag = draw(w) | 1;
	CHECK_EQ(write(pipe_fds[1], &tag, 8), 8);
	CHECK_EQ(read(pipe_fds[0], b->at + (size_t)page * PAGE, 8), 8);
	memcpy(b->at + (size_t)page * PAGE + PAGE - 8, &tag, 8);
	b->tags[page] = tag;
	close(pipe_fds[0]);
	close(pipe_fds[1]);
}

static void cut(struct worker *w, struct buffer *b)
{
	uint32_t keep = 1 + below(w, b->pages);

	if (b->kind != MMAP || keep == b->pages)
		return;
	CHECK_EQ(munmap(b->at + (size_t)keep * PAGE, (size_t)(b->pages - keep) * PAGE), 0);
	b->tags = more_tags(b, keep);
	b->pages = keep;
}

static void operate(struct worker *w)
{
	struct buffer *b = &w->buffers[below(w, BUFFERS)];
	uint32_t kind = below(w, 100);

	if (b->at == NULL) {
		make(w, b, 64 + below(w, 3000));
	} else if (kind < 35) {
		for (uint32_t i = 0; i < 40; i++)
			check_page(b, below(w, b->pages), "at random");
	} else if (kind < 50) {
		check_all(b, "in order");
	} else if (kind < 65) {
		uint32_t first = below(w, b->pages), pages = 1 + below(w, b->pages - first);

		for (uint32_t page = first; page < first + pages; page++)
			write_page(b, page, draw(w) | 1);
	} else if (kind < 75) {
		discard(w, b);
	} else if (kind < 82) {
		resize(w, b);
	} else if (kind < 88) {
		through_the_kernel(w, b);
	} else if (kind < 92) {
		cut(w, b);
	} else {
		end(b);
	}
}

static void *work(void *arg)
{
	struct worker *w = arg;

	for (uint32_t i = 0; i < w->operations; i++)
		operate(w);
	for (uint32_t i = 0; i < BUFFERS; i++)
		if (w->buffers[i].at != NULL)
			end(&w->buffers[i]);
	return NULL;
}

/* A handler that touches memory of the agent's, at any moment. */
static unsigned char *touched;
static void touch(int number)
{
	(void)number;
	touched[(size_t)(rand() % 1024) * PAGE]++;
}

static int case_model(uint32_t operations)
{
	struct worker workers[THREADS];
	struct itimerspec often = {.it_interval.tv_nsec = 3000000, .it_value.tv_nsec = 3000000};
	struct sigevent event = {.sigev_notify = SIGEV_SIGNAL, .sigev_signo = SIGUSR1};
	timer_t timer;

	touched = mmap(NULL, 4 * MIB, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	signal(SIGUSR1, touch);
	CHECK_EQ(timer_create(CLOCK_MONOTONIC, &event, &timer), 0);
	CHECK_EQ(timer_settime(timer, 0, &often, NULL), 0);
	for (uint32_t i = 0; i < THREADS; i++) {
		workers[i] = (struct worker){
			.random = 88172645463325252ull + i * 7919 + operations,
			.operations = operations,
		};
		CHECK_EQ(pthread_create(&workers[i].thread, NULL, work, &workers[i]), 0);
	}
	for (uint32_t i = 0; i < THREADS; i++)
		pthread_join(workers[i].thread, NULL);
	return 0;
}

/* ------------------------------------------------------------- single ways */

static struct worker one = {.random = 88172645463325252ull};

/* A buffer of that kind, most of which has left by now: the agent evicts all that it can. */
static struct buffer away(enum kind kind, uint32_t pages)
{
	struct buffer b = {.at = NULL};
	const struct timespec while_ = {.tv_nsec = 200000000};

	for (;;) {
		make(&one, &b, pages);
		if (b.kind == kind)
			break;
		end(&b);
	}
	nanosleep(&while_, NULL);
	return b;
}

static int case_fork(uint32_t n)
{
	struct buffer b = away(MALLOC, 4000), later;

	(void)n;
	for (int i = 0; i < 3; i++) {
		pid_t pid = fork();
		int status;

		CHECK(pid >= 0);
		if (pid == 0) {
			check_all(&b, "in a child");
			write_page(&b, 5, 77);
			check_page(&b, 5, "written by a child");
			void *own = calloc(1, 8 * MIB); /* not the agent's here */
			CHECK(own != NULL && *(char *)own == 0);
			free(own);
			free(b.at);
			_exit(0);
		}
		CHECK_EQ(waitpid(pid, &status, 0), pid);
		CHECK_EQ(status, 0);
		check_all(&b, "after a child");
	}
	later = away(CALLOC, 3000); /* what came after the forks may leave */
	check_all(&later, "later");
	check_all(&b, "at the end");
	end(&b);
	end(&later);
	return 0;
}

/* Moves and removes mappings without the agent's knowledge. */
static int case_behind(uint32_t n)
{
	struct buffer b = away(MMAP, 3000);
	unsigned char *at, *hole, *to;

	(void)n;
	hole = b.at + 1024 * PAGE;
	to = mmap(NULL, 1000 * PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	at = (unsigned char *)syscall(SYS_mremap, hole, 1000 * PAGE, 1000 * PAGE,
				      MREMAP_MAYMOVE | MREMAP_FIXED, to);
	CHECK(at == to);
	for (uint32_t i = 0; i < 1000; i++) {
		uint64_t tag;

		memcpy(&tag, at + (size_t)i * PAGE, 8);
		CHECK_EQ(tag, b.tags[1024 + i]);
	}
	/* Somebody else is mapped where it was. */
	CHECK(syscall(SYS_mmap, hole, 1000 * PAGE, PROT_READ | PROT_WRITE,
		      MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) == (long)hole);
	memset(hole, 9, 1000 * PAGE);
	for (uint32_t i = 0; i < 1024; i++)
		check_page(&b, i, "before the hole");
	for (uint32_t i = 2024; i < b.pages; i++)
		check_page(&b, i, "behind the hole");
	(void)away(MMAP, 6000); /* others come and go */
	for (uint32_t i = 0; i < 1000 * PAGE; i++)
		CHECK_EQ(hole[i], 9);
	return 0;
}

static int case_protected(uint32_t n)
{
	struct buffer b = away(MMAP, 2000);

	(void)n;
	CHECK_EQ(mprotect(b.at + 100 * PAGE, 300 * PAGE, PROT_READ), 0);
	check_all(&b, "read-only");
	CHECK_EQ(mprotect(b.at + 100 * PAGE, 300 * PAGE, PROT_READ | PROT_WRITE), 0);
	write_page(&b, 200, 3);
	if (mlock(b.at + 1500 * PAGE, 10 * PAGE) != 0)
		CHECK(errno == ENOMEM || errno == EPERM || errno == EAGAIN);
	check_all(&b, "locked");
	end(&b);
	return 0;
}

static int case_descriptors(uint32_t n)
{
	struct buffer b = away(MALLOC, 3000);

	(void)n;
	for (int fd = 3; fd < 2048; fd++)
		close(fd);
	check_all(&b, "after close");
	CHECK_EQ(close_range(3, ~0u, 0), 0);
	closefrom(3);
	check_all(&b, "after close_range");
	end(&b);
	b = away(MALLOC, 3000);
	check_all(&b, "afterwards");
	return 0;
}

/* A program that this one starts has an agent of its own, also behind close_fds. */
static int case_spawn(uint32_t n)
{
	char *argv[] = {"far_job", "model", "15", NULL};
	struct buffer b = away(MALLOC, 3000);
	char path[4096];
	ssize_t length = readlink("/proc/self/exe", path, sizeof(path) - 1);
	int status;
	pid_t pid;

	(void)n;
	CHECK(length > 0);
	path[length] = '\0';
	CHECK_EQ(posix_spawn(&pid, path, NULL, NULL, argv, environ), 0);
	CHECK_EQ(waitpid(pid, &status, 0), pid);
	CHECK_EQ(status, 0);
	check_all(&b, "beside another program");
	if (n == 0) { /* and the same in its place */
		char *again[] = {"far_job", "spawn", "1", NULL};

		execve(path, again, environ);
		return 1;
	}
	end(&b);
	return 0;
}

/* As long as the file is not there: it writes and reads. */
static int case_until(uint32_t n)
{
	struct buffer b = away(MALLOC, 6000);

	(void)n;
	printf("begun\n");
	fflush(stdout);
	for (uint32_t i = 0; access("far_job.end", F_OK) != 0 && i < 100000; i++) {
		uint32_t page = below(&one, b.pages);

		check_page(&b, page, "again and again");
		write_page(&b, page, draw(&one) | 1);
		if (i % 500 == 0)
			check_all(&b, "all");
	}
	end(&b);
	return 0;
}

/* Its bytes are lost: SIGBUS, never zeros. */
static int case_lost(uint32_t n)
{
	struct buffer b = away(MALLOC, 6000);

	(void)n;
	printf("begun\n");
	fflush(stdout);
	while (access("far_job.end", F_OK) != 0)
		usleep(10000);
	check_all(&b, "lost");
	return 0;
}

int main(int argc, char **argv)
{
	static const struct {
		const char *name;
		int (*run)(uint32_t);
	} cases[] = {
		{"model", case_model},   {"fork", case_fork},
		{"behind", case_behind}, {"protected", case_protected},
		{"spawn", case_spawn},   {"descriptors", case_descriptors},
		{"until", case_until},   {"lost", case_lost},
	};

	CHECK(argc >= 2);
	for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++)
		if (strcmp(cases[i].name, argv[1]) == 0)
			return cases[i].run(argc > 2 ? (uint32_t)atoi(argv[2]) : 0);
	return 2;
}
