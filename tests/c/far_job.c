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
#include <linux/userfaultfd.h>
#include <malloc.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <spawn.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/resource.h>
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
	switch (below(w, 3)) {
	case 0:
		CHECK_EQ(madvise(at, (size_t)pages * PAGE, MADV_DONTNEED), 0);
		break;
	case 1:
		CHECK_EQ(syscall(SYS_madvise, at, (size_t)pages * PAGE, MADV_DONTNEED), 0);
		break;
	default: /* nobody knows what is there until it is written */
		CHECK_EQ(syscall(SYS_madvise, at, (size_t)pages * PAGE, MADV_FREE), 0);
		for (uint32_t page = first; page < first + pages; page++)
			write_page(b, page, draw(w) | 1);
		return;
	}
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

/* How many bytes of the range are mapped at all. */
static size_t mapped(const void *at, size_t bytes)
{
	unsigned char in_memory;
	size_t n = 0;

	for (size_t i = 0; i < bytes; i += PAGE)
		n += mincore((char *)(uintptr_t)at + i, PAGE, &in_memory) == 0 ? PAGE : 0;
	return n;
}

static int case_fork(uint32_t n)
{
	struct buffer b = away(MALLOC, 4000), mapped_too = away(MMAP, 1000), later;

	(void)n;
	/* A block with a hole stays managed until the fork, and is the child's then, too. */
	CHECK_EQ(syscall(SYS_munmap, mapped_too.at + 900 * PAGE, 100 * PAGE), 0);
	mapped_too.pages = 900;
	for (int i = 0; i < 3; i++) {
		pid_t pid = fork();
		void *at;
		int status;

		CHECK(pid >= 0);
		if (pid == 0) {
			check_all(&b, "in a child");
			check_all(&mapped_too, "with a hole, in a child");
			write_page(&b, 5, 77);
			check_page(&b, 5, "written by a child");
			void *own = calloc(1, 8 * MIB); /* not the agent's here */
			CHECK(own != NULL && *(char *)own == 0);
			free(own);
			at = b.at;
			b.at = realloc(at, 4500 * PAGE);
			CHECK(b.at != NULL);
			check_all(&b, "grown in a child");
			CHECK_EQ(mapped(at, 4000 * PAGE), 0);
			free(b.at);
			CHECK_EQ(malloc_usable_size(calloc(1, MIB)) >= MIB, true);
			own = mmap(NULL, 4 * MIB, PROT_READ | PROT_WRITE,
				   MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
			CHECK(own != MAP_FAILED && *(char *)own == 0);
			CHECK_EQ(munmap(own, 4 * MIB), 0);
			CHECK_EQ(munmap(mapped_too.at, (size_t)mapped_too.pages * PAGE), 0);
			CHECK_EQ(mapped(mapped_too.at, (size_t)mapped_too.pages * PAGE), 0);
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
	end(&mapped_too);
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

/* Waits until part of the buffer is away: the kernel alone never takes all that it has filled. */
static void wait_away(const struct buffer *b)
{
	unsigned char in_memory[8 * MIB / PAGE];

	CHECK(b->pages <= sizeof(in_memory));
	for (uint32_t i = 0;; i++) {
		CHECK(i < 20000);
		CHECK_EQ(mincore(b->at, (size_t)b->pages * PAGE, in_memory), 0);
		for (uint32_t page = 0; page < b->pages; page++)
			if (!(in_memory[page] & 1))
				return;
		usleep(1000);
	}
}

/* An address without MAP_FIXED is a wish: the memory is far all the same, and nobody's is taken. */
static int case_wished(uint32_t n)
{
	struct buffer b = away(MMAP, 3000), wished[4];
	void *freed = mmap(NULL, 8 * MIB, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	unsigned char *wishes[] = {freed, b.at, b.at + 700 * PAGE + 8, (unsigned char *)&one};
	const uint32_t pages = 8 * MIB / PAGE;

	(void)n;
	CHECK(freed != MAP_FAILED && munmap(freed, 8 * MIB) == 0);
	for (uint32_t i = 0; i < 4; i++) {
		struct buffer *w = &wished[i];

		*w = (struct buffer){.pages = pages, .kind = MMAP};
		w->tags = calloc(pages, sizeof(*w->tags));
		w->at = mmap(wishes[i], 8 * MIB, PROT_READ | PROT_WRITE,
			     MAP_PRIVATE | MAP_ANONYMOUS | (i == 3 ? MAP_NORESERVE : 0), -1, 0);
		CHECK(w->tags != NULL && w->at != MAP_FAILED);
		check_all(w, "new");
		for (uint32_t page = 0; page < pages; page++)
			write_page(w, page, draw(&one) | 1);
	}
	for (uint32_t i = 0; i < 4; i++)
		wait_away(&wished[i]);
	check_all(&b, "beside the wishes");
	for (uint32_t i = 0; i < 4; i++)
		end(&wished[i]);
	end(&b);
	return 0;
}

/* Allocates all that there is room for: each is zeros, and none lies in the range. */
static void fill_arena(const void *from, size_t bytes)
{
	enum { MOST = 24 };
	unsigned char *at[MOST];

	for (uint32_t i = 0; i < MOST; i++) {
		size_t size = (256 + 512 * (i % 5)) * PAGE;

		at[i] = calloc(1, size);
		CHECK(at[i] != NULL);
		CHECK(at[i] >= (unsigned char *)from + bytes ||
		      at[i] + size <= (unsigned char *)from);
		for (size_t j = 0; j < size; j += PAGE)
			CHECK_EQ(at[i][j], 0);
		memset(at[i], 1, size);
	}
	for (uint32_t i = 0; i < MOST; i++)
		free(at[i]);
}

static void *map_fixed(void *at, size_t bytes, bool seen, int fd)
{
	int flags = MAP_FIXED | (fd < 0 ? MAP_PRIVATE | MAP_ANONYMOUS : MAP_SHARED);

	if (seen)
		return mmap(at, bytes, PROT_READ | PROT_WRITE, flags, fd, 0);
	return (void *)syscall(SYS_mmap, at, bytes, PROT_READ | PROT_WRITE, flags, fd, 0);
}

/* A mapping laid over freed or living memory stays what it is; by a call that the agent sees or
 * not. */
static void lay_over(bool seen, bool freed)
{
	const size_t bytes = 700 * PAGE;
	struct buffer b = away(MMAP, 3000), other = away(CALLOC, 1500);
	unsigned char *over = b.at + 900 * PAGE;
	int fd = memfd_create("over", MFD_CLOEXEC);

	CHECK(fd >= 0 && ftruncate(fd, (off_t)bytes) == 0);
	if (freed)
		CHECK_EQ(munmap(b.at, (size_t)b.pages * PAGE), 0);
	CHECK(map_fixed(over, bytes, seen, -1) == over);
	memset(over, 9, bytes);
	fill_arena(over, bytes);
	for (size_t i = 0; i < bytes; i++)
		CHECK_EQ(over[i], 9);
	for (uint32_t i = 0; !freed && i < 900; i++)
		check_page(&b, i, "before");
	for (uint32_t i = 1600; !freed && i < b.pages; i++)
		check_page(&b, i, "behind");
	check_all(&other, "beside");
	/* It is another's, so what is done to it is done by the kernel. */
	CHECK(map_fixed(over, bytes, seen, fd) == over);
	memset(over, 7, bytes);
	CHECK_EQ(madvise(over, bytes, MADV_DONTNEED), 0);
	CHECK_EQ(over[5 * PAGE], 7);
	CHECK_EQ(munmap(over, bytes), 0);
	CHECK_EQ(mapped(over, bytes), 0);
	fill_arena(over, bytes);
	if (!freed)
		CHECK_EQ(munmap(b.at, (size_t)b.pages * PAGE), 0);
	free(b.tags);
	end(&other);
	close(fd);
}

static int case_laid_over(uint32_t n)
{
	(void)n;
	lay_over(true, false);
	lay_over(true, true);
	lay_over(false, false);
	lay_over(false, true);
	return 0;
}

/* Something else is mapped in a hole, where an allocation of the agent's began. */
static int case_hole(uint32_t n)
{
	struct buffer b = away(MMAP, 4000);
	unsigned char *at = b.at;

	(void)n;
	CHECK_EQ(syscall(SYS_munmap, at, 500 * PAGE), 0);
	CHECK(syscall(SYS_mmap, at, 500 * PAGE, PROT_READ | PROT_WRITE,
		      MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, -1, 0) == (long)at);
	memset(at, 9, 500 * PAGE);
	fill_arena(at, 500 * PAGE);
	for (uint32_t i = 500; i < b.pages; i++)
		check_page(&b, i, "behind the hole");
	CHECK_EQ(madvise(at, PAGE, MADV_DONTNEED), 0);
	CHECK_EQ(at[0], 0);
	CHECK_EQ(at[PAGE], 9);
	/* It and what is left of the first, with one call. */
	CHECK_EQ(munmap(at, (size_t)b.pages * PAGE), 0);
	CHECK_EQ(mapped(at, 500 * PAGE), 0);
	fill_arena(at, 500 * PAGE);
	free(b.tags);
	return 0;
}

/* Behind the agent: from a page before the arena, over what could be moved away as a whole. */
static int edge_behind(const struct buffer *b)
{
	for (uint32_t i = 0; i < 512; i++)
		check_page(b, i, "at home");
	CHECK_EQ(syscall(SYS_munmap, b->at - PAGE, 600 * PAGE), 0);
	CHECK(map_fixed(b->at, 512 * PAGE, false, -1) == b->at);
	memset(b->at, 9, 512 * PAGE);
	fill_arena(b->at, 599 * PAGE);
	for (size_t i = 0; i < 512 * PAGE; i++)
		CHECK_EQ(b->at[i], 9);
	for (uint32_t i = 599; i < b->pages; i++)
		check_page(b, i, "unmapped behind the agent");
	return 0;
}

/* Calls over a range of which only a part is the agent's: the first allocation begins the arena. */
static int case_edges(uint32_t n)
{
	struct buffer b = away(MMAP, 3000);
	unsigned char *before = b.at - 2 * PAGE;

	if (n == 1)
		return edge_behind(&b);
	CHECK(mmap(before, 2 * PAGE, PROT_READ | PROT_WRITE,
		   MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, -1, 0) == before);
	memset(before, 5, 2 * PAGE);
	CHECK_EQ(madvise(before + PAGE, 4 * PAGE, MADV_DONTNEED), 0);
	CHECK_EQ(before[0], 5);
	CHECK_EQ(before[PAGE], 0);
	memset(b.tags, 0, 3 * sizeof(*b.tags));
	check_all(&b, "discarded from before it");
	CHECK_EQ(syscall(SYS_madvise, before, 7 * PAGE, MADV_DONTNEED), 0);
	memset(b.tags, 0, 5 * sizeof(*b.tags));
	check_all(&b, "discarded behind the agent");
	CHECK_EQ(mprotect(before, 12 * PAGE, PROT_READ), 0);
	check_all(&b, "read-only");
	CHECK_EQ(mprotect(before, 12 * PAGE, PROT_READ | PROT_WRITE), 0);
	CHECK_EQ(munmap(before + PAGE, 11 * PAGE), 0);
	CHECK_EQ(mapped(before, 2 * PAGE), PAGE);
	for (uint32_t i = 10; i < b.pages; i++)
		check_page(&b, i, "what is left");
	CHECK_EQ(munmap(before, (size_t)(b.pages + 2) * PAGE), 0);
	CHECK_EQ(mapped(before, 2 * PAGE), 0);
	free(b.tags);
	return 0;
}

static size_t status_kib(const char *name)
{
	FILE *file = fopen("/proc/self/status", "r");
	char line[256];
	size_t kib = 0;

	CHECK(file != NULL);
	while (fgets(line, sizeof(line), file) != NULL)
		if (strncmp(line, name, strlen(name)) == 0)
			kib = strtoul(line + strlen(name), NULL, 10);
	fclose(file);
	return kib;
}

/* All memory is locked: the program's, not addresses that the agent has reserved. */
static int case_locked_all(uint32_t n)
{
	struct buffer b = away(MMAP, 20000), small = away(MALLOC, 700);

	(void)n;
	CHECK_EQ(munmap(b.at + 2000 * PAGE, 16000 * PAGE), 0);
	if (mlockall(MCL_CURRENT) != 0) {
		CHECK(errno == ENOMEM || errno == EPERM);
	} else {
		CHECK(status_kib("VmLck:") < 128 * 1024);
	}
	for (uint32_t i = 0; i < 2000; i++)
		check_page(&b, i, "locked");
	for (uint32_t i = 18000; i < 20000; i++)
		check_page(&b, i, "locked, too");
	check_all(&small, "small");
	CHECK_EQ(munmap(b.at, (size_t)b.pages * PAGE), 0);
	CHECK_EQ(mapped(b.at, 2000 * PAGE), 0);
	free(b.tags);
	end(&small);
	fill_arena(NULL, 0);
	return 0;
}

static void *does_nothing(void *arg)
{
	return arg;
}

static int limit_by(uint32_t way, const struct rlimit *limit)
{
	switch (way) {
	case 0:
		return setrlimit(RLIMIT_AS, limit);
	case 1:
		return prlimit(getpid(), RLIMIT_DATA, limit, NULL);
	default:
		return (int)syscall(SYS_prlimit64, 0, RLIMIT_AS, limit, NULL);
	}
}

/*
 * A limit of addresses, of which the agent has reserved many, leaves the program those it needs;
 * one of a child in its memory changes nothing.
 */
static int case_limited(uint32_t way)
{
	struct buffer b = away(MMAP, 20000), more = {.at = NULL};
	struct rlimit limit = {1ull << 30, 1ull << 30};
	pthread_t thread;
	size_t before = status_kib("VmSize:");
	int status;
	pid_t pid = vfork();

	if (pid == 0)
		_exit(limit_by(way, &limit) == 0 ? 0 : 1);
	CHECK_EQ(waitpid(pid, &status, 0), pid);
	CHECK_EQ(status, 0);
	CHECK(status_kib("VmSize:") > before / 2);
	CHECK_EQ(limit_by(way, &limit), 0);
	CHECK(status_kib("VmSize:") < before / 2);
	CHECK_EQ(pthread_create(&thread, NULL, does_nothing, NULL), 0);
	CHECK_EQ(pthread_join(thread, NULL), 0);
	make(&one, &more, 20000);
	check_all(&b, "limited");
	check_all(&more, "allocated since");
	end(&more);
	end(&b);
	return 0;
}

/* mbind, another userfaultfd, mlock: each range comes home, and stays right. */
static int case_policies(uint32_t n)
{
	struct buffer b = away(MMAP, 4000);
	unsigned char in_memory[4000];
	struct uffdio_api api = {.api = UFFD_API};
	int fd = (int)syscall(SYS_userfaultfd, O_CLOEXEC);
	struct uffdio_register range = {
		.range = {(uintptr_t)b.at + 2100 * PAGE, 300 * PAGE},
		.mode = UFFDIO_REGISTER_MODE_MISSING,
	};

	(void)n;
	for (uint32_t i = 0; i < b.pages; i++)
		write_page(&b, i, i + 1);
	usleep(200000);
	if (syscall(SYS_mbind, b.at + 600 * PAGE, 300 * PAGE, 0 /* MPOL_DEFAULT */, NULL, 0, 0) !=
	    0)
		CHECK(errno == ENOSYS || errno == EPERM);
	CHECK_EQ(mincore(b.at + 600 * PAGE, 300 * PAGE, in_memory), 0);
	CHECK(fd >= 0 && ioctl(fd, UFFDIO_API, &api) == 0);
	CHECK_EQ(ioctl(fd, UFFDIO_REGISTER, &range), 0);
	CHECK_EQ(mincore(b.at + 2100 * PAGE, 300 * PAGE, in_memory), 0);
	for (uint32_t i = 0; i < 300; i++)
		CHECK(in_memory[i] & 1);
	if (mlock(b.at + 3100 * PAGE + 100, 10 * PAGE) == 0)
		CHECK_EQ(munlock(b.at + 3100 * PAGE + 100, 10 * PAGE), 0);
	check_all(&b, "with policies");
	close(fd);
	end(&b);
	/* Locked behind the agent: the kernel refuses to discard it, so it is not given again. */
	b = away(MALLOC, 3000);
	CHECK_EQ(syscall(SYS_mlock, b.at + 50 * PAGE, 20 * PAGE), 0);
	CHECK_EQ(madvise(b.at + 50 * PAGE, PAGE, MADV_DONTNEED), -1);
	CHECK_EQ(errno, EINVAL);
	check_all(&b, "locked");
	end(&b);
	fill_arena(NULL, 0);
	return 0;
}

/* mremap of a part, and to a place of the program's own. */
static int case_moved(uint32_t n)
{
	struct buffer b = away(MMAP, 4000), to = away(MMAP, 2000), other = away(MALLOC, 2000);
	unsigned char *at;

	(void)n;
	at = mremap(b.at + 700 * PAGE, 900 * PAGE, 1200 * PAGE, MREMAP_MAYMOVE);
	CHECK(at != MAP_FAILED);
	for (uint32_t i = 0; i < 900; i++)
		CHECK_EQ(*(uint64_t *)(void *)(at + (size_t)i * PAGE), b.tags[700 + i]);
	for (uint32_t i = 900; i < 1200; i++)
		CHECK_EQ(*(uint64_t *)(void *)(at + (size_t)i * PAGE), 0);
	CHECK(mremap(b.at + 2000 * PAGE, 800 * PAGE, 800 * PAGE, MREMAP_MAYMOVE | MREMAP_FIXED,
		     to.at + 300 * PAGE) == to.at + 300 * PAGE);
	for (uint32_t i = 0; i < 800; i++)
		to.tags[300 + i] = b.tags[2000 + i];
	check_all(&to, "moved into");
	for (uint32_t i = 0; i < 700; i++)
		check_page(&b, i, "before the parts");
	for (uint32_t i = 2800; i < b.pages; i++)
		check_page(&b, i, "behind the parts");
	fill_arena(to.at + 300 * PAGE, 800 * PAGE);
	CHECK_EQ(munmap(at, 1200 * PAGE), 0);
	CHECK_EQ(munmap(b.at, (size_t)b.pages * PAGE), 0);
	end(&to);
	end(&other);
	free(b.tags);
	CHECK(mremap(&n, 0, 1ull << 60, MREMAP_MAYMOVE) == MAP_FAILED);
	return 0;
}

/* Behind the agent, which hears of the move while the program gives up what is left of the range.
 */
static int case_moved_behind(uint32_t n)
{
	(void)n;
	for (uint32_t i = 0; i < 20; i++) {
		struct buffer b = away(MMAP, 3000);
		unsigned char *to =
			mmap(NULL, 1800 * PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

		CHECK(syscall(SYS_mremap, b.at + 600 * PAGE, 1800 * PAGE, 1800 * PAGE,
			      MREMAP_MAYMOVE | MREMAP_FIXED, to) == (long)to);
		CHECK_EQ(munmap(b.at, (size_t)b.pages * PAGE), 0);
		for (uint32_t page = 0; page < 1800; page++)
			CHECK_EQ(*(uint64_t *)(void *)(to + (size_t)page * PAGE),
				 b.tags[600 + page]);
		CHECK_EQ(munmap(to, 1800 * PAGE), 0);
		free(b.tags);
	}
	return 0;
}

/* Pages that one thread discards behind the agent while another reads the whole buffer in order. */
enum { SHARED_PAGES = 2048, DISCARDERS = 2 };

static struct {
	unsigned char *at;
	atomic_bool end;
} shared;

static void *discard_and_look(void *arg)
{
	struct worker w = {.random = 88172645463325252ull + (uintptr_t)arg};

	for (uint32_t i = 0; i < 4000; i++) {
		uint32_t page = below(&w, SHARED_PAGES / DISCARDERS) * DISCARDERS;
		unsigned char *at = shared.at + (page + (uintptr_t)arg) * (size_t)PAGE;

		/* What it wrote long ago may be on its way back. */
		CHECK_EQ(syscall(SYS_madvise, at, PAGE, MADV_DONTNEED), 0);
		CHECK_EQ(at[8], 0);
		at[8] = 1;
		at[PAGE - 1] = 1;
		if (below(&w, 8) == 0)
			sched_yield();
		CHECK_EQ(at[8] + at[PAGE - 1], 2);
	}
	return NULL;
}

static void *read_in_order(void *arg)
{
	volatile unsigned char *at = shared.at;

	(void)arg;
	while (!atomic_load(&shared.end))
		for (uint32_t page = 0; page < SHARED_PAGES; page++)
			(void)at[(size_t)page * PAGE];
	return NULL;
}

static int case_discards(uint32_t n)
{
	pthread_t discarders[DISCARDERS], reader;

	(void)n;
	shared.at = malloc((size_t)SHARED_PAGES * PAGE);
	CHECK(shared.at != NULL);
	memset(shared.at, 1, (size_t)SHARED_PAGES * PAGE);
	CHECK_EQ(pthread_create(&reader, NULL, read_in_order, NULL), 0);
	for (uintptr_t i = 0; i < DISCARDERS; i++)
		CHECK_EQ(pthread_create(&discarders[i], NULL, discard_and_look, (void *)i), 0);
	for (uint32_t i = 0; i < DISCARDERS; i++)
		pthread_join(discarders[i], NULL);
	atomic_store(&shared.end, true);
	pthread_join(reader, NULL);
	free(shared.at);
	return 0;
}

/* What programs expect of an allocator. */
static int case_allocator(uint32_t n)
{
	struct buffer b = away(MALLOC, 1000), next = away(MALLOC, 600);
	void *at, *before;

	(void)n;
	for (size_t align = 16; align <= (8u << 20); align *= 2) {
		at = memalign(align, 3 * MIB + 1);
		CHECK(at != NULL && (uintptr_t)at % align == 0);
		CHECK(malloc_usable_size(at) >= 3 * MIB + 1);
		memset(at, 1, malloc_usable_size(at));
		free(at);
		errno = 77;
		CHECK_EQ(posix_memalign(&at, align, MIB), 0);
		CHECK_EQ(errno, 77);
		CHECK_EQ((uintptr_t)at % align, 0);
		free(at);
	}
	at = memalign(3 * PAGE, MIB); /* no power of two: the next one */
	CHECK(at != NULL && (uintptr_t)at % (4 * PAGE) == 0);
	free(at);
	CHECK_EQ(posix_memalign(&at, 24, MIB), EINVAL);
	CHECK_EQ(munmap(b.at, 0), -1);
	CHECK_EQ(errno, EINVAL);
	at = b.at;
	errno = 0;
	before = realloc(at, SIZE_MAX / 2);
	CHECK(before == NULL && errno == ENOMEM);
	before = realloc(at, (size_t)1 << 44); /* pages beyond 32 bits */
	CHECK(before == NULL);
	check_all(&b, "refused");
	/* It grows over the borders of blocks, and shrinks to what the next allocator gives. */
	for (uint32_t pages = 1000; pages < 9000; pages += 700) {
		at = realloc(b.at, (size_t)pages * PAGE);
		CHECK(at != NULL);
		b.tags = more_tags(&b, pages);
		b.at = at;
		for (uint32_t page = b.pages; page < pages; page++)
			write_page(&b, page, draw(&one) | 1);
		b.pages = pages;
		check_all(&b, "grown");
		check_all(&next, "beside it");
	}
	for (uint32_t pages = 9000; pages > 10; pages /= 3) {
		if (pages > b.pages)
			continue;
		b.at = realloc(b.at, (size_t)pages * PAGE);
		CHECK(b.at != NULL);
		b.pages = pages;
		check_all(&b, "shrunk");
	}
	end(&b);
	end(&next);
	fill_arena(NULL, 0);
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

/* What allocators reserve at once, several times what the device holds, is used here and there. */
enum { RESERVED_PAGES = 1024 * (MIB / PAGE), STEP_PAGES = 4096, USED_PAGES = 16 };

static unsigned char *reserve(uint32_t number)
{
	unsigned char *at = mmap(NULL, (size_t)RESERVED_PAGES * PAGE, PROT_READ | PROT_WRITE,
				 MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);

	CHECK(at != MAP_FAILED);
	for (uint32_t page = 0; page < RESERVED_PAGES; page += STEP_PAGES)
		for (uint32_t i = page; i < page + USED_PAGES; i++)
			*(uint64_t *)(void *)(at + (size_t)i * PAGE) = i + number;
	return at;
}

/* Most of it has left. */
static void check_reserved(unsigned char *at, uint32_t number)
{
	unsigned char in_memory[USED_PAGES];
	uint32_t there = 0;

	for (uint32_t page = 0; page < RESERVED_PAGES; page += STEP_PAGES) {
		CHECK_EQ(mincore(at + (size_t)page * PAGE, USED_PAGES * PAGE, in_memory), 0);
		for (uint32_t i = 0; i < USED_PAGES; i++)
			there += in_memory[i] & 1;
	}
	CHECK(there < RESERVED_PAGES / STEP_PAGES * USED_PAGES / 2);
	for (uint32_t page = 0; page < RESERVED_PAGES; page += STEP_PAGES)
		for (uint32_t i = page; i < page + USED_PAGES; i++)
			CHECK_EQ(*(uint64_t *)(void *)(at + (size_t)i * PAGE), i + number);
}

static int case_reserved(uint32_t n)
{
	enum { RESERVATIONS = 5 };
	struct buffer first = away(MALLOC, 1000);
	unsigned char *at[RESERVATIONS];

	(void)n;
	for (uint32_t i = 0; i < RESERVATIONS; i++)
		at[i] = reserve(i + 1);
	usleep(300000);
	for (uint32_t i = 0; i < RESERVATIONS; i++) {
		check_reserved(at[i], i + 1);
		CHECK_EQ(munmap(at[i], (size_t)RESERVED_PAGES * PAGE), 0);
	}
	end(&first);
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

/* malloc, calloc and free are no places where a thread is cancelled. */
static void *allocate_for_ever(void *arg)
{
	unsigned char *at;

	(void)arg;
	for (;;) {
		at = calloc(1, 3 * MIB);
		CHECK(at != NULL && at[MIB] == 0);
		memset(at, 1, 3 * MIB);
		free(at);
		pthread_testcancel();
	}
	return NULL;
}

static int case_cancelled(uint32_t n)
{
	struct buffer b = away(MALLOC, 6000);
	pthread_t threads[THREADS];

	(void)n;
	for (uint32_t round = 0; round < 20; round++) {
		for (uint32_t i = 0; i < THREADS; i++)
			CHECK_EQ(pthread_create(&threads[i], NULL, allocate_for_ever, NULL), 0);
		usleep(5000);
		for (uint32_t i = 0; i < THREADS; i++) {
			CHECK_EQ(pthread_cancel(threads[i]), 0);
			CHECK_EQ(pthread_join(threads[i], NULL), 0);
		}
		check_all(&b, "cancelled");
	}
	end(&b);
	return 0;
}

static void fill_words(unsigned char *at, uint64_t value)
{
	for (size_t i = 0; i < MIB; i += 8)
		*(uint64_t *)(void *)(at + i) = value;
}

static void check_words(const unsigned char *at, uint64_t value)
{
	for (size_t i = 0; i < MIB; i += 8)
		CHECK_EQ(*(const uint64_t *)(const void *)(at + i), value);
}

/* The rests of huge pages behind allocations that are no whole blocks, before and after the job's
 * limit is near: they belong to later allocations. */
static int case_rests(uint32_t n)
{
	enum { ALLOCATIONS = 40 };
	unsigned char *large[ALLOCATIONS], *small[ALLOCATIONS];

	(void)n;
	for (uint32_t i = 0; i < ALLOCATIONS; i++) {
		large[i] = malloc(3 * MIB);
		CHECK(large[i] != NULL);
		for (uint32_t j = 0; j < 3; j++)
			fill_words(large[i] + j * MIB, i + 1);
	}
	wait_away(&(struct buffer){.at = large[0], .pages = 3 * MIB / PAGE});
	for (uint32_t turn = 0; turn < 3; turn++) {
		for (uint32_t i = 0; i < ALLOCATIONS; i++) {
			small[i] = turn % 2 != 0 ? calloc(1, MIB) : malloc(MIB);
			CHECK(small[i] != NULL);
			if (turn % 2 != 0)
				check_words(small[i], 0);
			fill_words(small[i], 1000 * turn + i);
		}
		for (uint32_t i = 0; i < ALLOCATIONS; i++) {
			unsigned char *page = (unsigned char *)(((uintptr_t)small[i] + PAGE - 1) &
								~(uintptr_t)(PAGE - 1));

			check_words(small[i], 1000 * turn + i);
			CHECK_EQ(madvise(page, PAGE, MADV_DONTNEED), 0);
			CHECK_EQ(*(uint64_t *)(void *)page, 0);
			free(small[i]);
		}
	}
	for (uint32_t i = 0; i < ALLOCATIONS; i++) {
		for (uint32_t j = 0; j < 3; j++)
			check_words(large[i] + j * MIB, i + 1);
		free(large[i]);
	}
	return 0;
}

int main(int argc, char **argv)
{
	static const struct {
		const char *name;
		int (*run)(uint32_t);
	} cases[] = {
		{"model", case_model},         {"fork", case_fork},
		{"behind", case_behind},       {"protected", case_protected},
		{"spawn", case_spawn},         {"descriptors", case_descriptors},
		{"until", case_until},         {"lost", case_lost},
		{"laid_over", case_laid_over}, {"hole", case_hole},
		{"edges", case_edges},         {"locked_all", case_locked_all},
		{"policies", case_policies},   {"moved", case_moved},
		{"allocator", case_allocator}, {"cancelled", case_cancelled},
		{"discards", case_discards},   {"wished", case_wished},
		{"limited", case_limited},     {"reserved", case_reserved},
		{"rests", case_rests},         {"moved-behind", case_moved_behind},
	};

	CHECK(argc >= 2);
	for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++)
		if (strcmp(cases[i].name, argv[1]) == 0)
			return cases[i].run(argc > 2 ? (uint32_t)atoi(argv[2]) : 0);
	return 2;
}
