/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Records which parts of its large memory a program touches. It is the agent without a device and
 * without a limit, so no page leaves the process: this file replaces link.c and budget.c. In every
 * window of WINDOW_NS it moves all of the memory aside, and a fault brings back one part. So each
 * part that the program touches in a window is recorded once in that window.
 *
 * Preload it with two variables: ISW_FAR_TRACE is a directory, where each process that asks for
 * large memory writes a file named by its pid; ISW_FAR_TRACE_PAGES is the size of a part. Parts of
 * one page are for programs that touch memory at random. They make others slow.
 */
#define _GNU_SOURCE 1
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include "far/blocks.h"
#include "far/real.h"
#include "trace.h"

#define WINDOW_NS   40000000
#define BLOCKS      4096u
#define RECORDS_MAX (1u << 26) /* the file is sparse */

#define A (&iswf_agent)

/* The linker redirects the agent's calls of these functions (--wrap). */
void __real_iswf_fault(char *at);
void __wrap_iswf_fault(char *at);
int __real_iswf_discard(uint32_t block, uint32_t first, uint32_t end, enum iswf_fate fate);
int __wrap_iswf_discard(uint32_t block, uint32_t first, uint32_t end, enum iswf_fate fate);
char *__real_iswf_take(size_t bytes, size_t align, enum iswf_request request);
char *__wrap_iswf_take(size_t bytes, size_t align, enum iswf_request request);
bool __real_iswf_resize(char *at, size_t bytes);
bool __wrap_iswf_resize(char *at, size_t bytes);
void __real_iswf_hand_back(uint32_t first, uint32_t end, bool children, enum iswf_why why);
void __wrap_iswf_hand_back(uint32_t first, uint32_t end, bool children, enum iswf_why why);
void __real_iswf_lose(uint32_t block, uint32_t first, uint32_t end);
void __wrap_iswf_lose(uint32_t block, uint32_t first, uint32_t end);
void __real_iswf_removed(char *from, char *end, bool unmapped, char *to);
void __wrap_iswf_removed(char *from, char *end, bool unmapped, char *to);

static struct record *records;
static atomic_uint records_count;
static uint32_t part_pages;
static uint64_t began_ns;

static void note(enum kind kind, uint32_t first, uint32_t pages)
{
	uint32_t at = atomic_fetch_add(&records_count, 1);

	if (at >= RECORDS_MAX - 1) {
		at = RECORDS_MAX - 1;
		kind = CUT;
	}
	records[at] = (struct record){(uint32_t)kind << KIND_SHIFT | first, pages};
}

static uint32_t page_of(const char *at)
{
	return (uint32_t)((at - A->arena) / ISWF_PAGE_BYTES);
}

/* ---------------------------------------------------------- in place of link.c, budget.c */

int iswf_budget_open(const char *cgroup)
{
	(void)cgroup;
	return 0;
}

void iswf_budget_close(void)
{
}

bool iswf_budget_look(void)
{
	return false;
}

static bool read_part_pages(void)
{
	const char *text = getenv("ISW_FAR_TRACE_PAGES");

	part_pages = text == NULL ? 0 : (uint32_t)strtoul(text, NULL, 10);
	return part_pages != 0 && ISWF_BLOCK_PAGES % part_pages == 0;
}

static int open_trace(void)
{
	const char *directory = getenv("ISW_FAR_TRACE");
	char path[4096];
	int fd, code = 0;

	if (directory == NULL)
		return -ENOENT;
	snprintf(path, sizeof(path), "%s/%d", directory, (int)getpid());
	fd = open(path, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
	if (fd < 0)
		return -errno;
	if (ftruncate(fd, (off_t)RECORDS_MAX * (off_t)sizeof(*records)) != 0)
		code = -errno;
	else
		records = iswf_real()->mmap(NULL, RECORDS_MAX * sizeof(*records),
					    PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	if (records == MAP_FAILED)
		code = -errno;
	iswf_real()->close(fd);
	return code;
}

int iswf_link_open(int job_fd, int uffd, uint32_t *blocks_out)
{
	int code = read_part_pages() ? open_trace() : -EINVAL;

	(void)job_fd, (void)uffd;
	if (code != 0)
		return code;
	began_ns = iswf_now_ns();
	note(PART_SIZE, 0, part_pages);
	A->budget_pages = 2 * (int64_t)BLOCKS * ISWF_BLOCK_PAGES;
	A->scarce = true; /* watched from the beginning */
	*blocks_out = BLOCKS;
	return 0;
}

void iswf_link_close(void)
{
}

void iswf_link_refuse(int job_fd, enum iswf_off off)
{
	(void)job_fd, (void)off;
}

void iswf_link_tell(void)
{
}

int iswf_link_ask(enum iswf_op op, uint32_t block, uint32_t first, uint32_t pages, char *bytes,
		  int (*take)(void *ctx, const char *from), void *ctx)
{
	(void)op, (void)block, (void)first, (void)pages, (void)bytes, (void)take, (void)ctx;
	return -ENOENT;
}

/* ------------------------------------------------------------------- windows */

/* Lock held. */
static bool may_go_aside(const struct iswf_block *b)
{
	return !b->claimed && !b->fixed && !b->left && iswf_mask_any(&b->home) &&
	       iswf_mask_any(&b->live);
}

static void set_aside(uint32_t block)
{
	struct iswf_block *b = &A->blocks[block];
	struct iswf_mask home, moved;
	int code;

	pthread_mutex_lock(&A->lock);
	if (may_go_aside(b) && b->slot == 0 && A->shadow_free_count == 0)
		note(CUT, 0, 0);
	if (!may_go_aside(b) || (b->slot == 0 && A->shadow_free_count == 0)) {
		pthread_mutex_unlock(&A->lock);
		return;
	}
	b->claimed = true;
	if (b->slot == 0)
		iswf_shadow_take(b);
	home = b->home;
	pthread_mutex_unlock(&A->lock);
	moved = iswf_move_runs(iswf_shadow_of(b), iswf_at(block), &home, &code);
	pthread_mutex_lock(&A->lock);
	b->tabled = true;
	b->filled = false;
	iswf_mask_add(&b->aside, &moved);
	iswf_mask_take(&b->home, &moved);
	iswf_shadow_give(b);
	iswf_release(block);
	pthread_mutex_unlock(&A->lock);
}

void *iswf_link_main(void *arg)
{
	const struct timespec window = {.tv_nsec = WINDOW_NS};

	(void)arg;
	for (;;) {
		nanosleep(&window, NULL);
		for (uint32_t block = 0; block < A->blocks_used; block++)
			set_aside(block);
		note(WINDOW, 0, (uint32_t)((iswf_now_ns() - began_ns) / 1000000u));
	}
	return NULL;
}

/* ------------------------------------------------------------------- faults */

/* Claimed, without the lock. Returns the pages of the part that are home now. */
static struct iswf_mask bring(uint32_t block, const struct iswf_mask *aside,
			      const struct iswf_mask *empty, struct iswf_mask *met)
{
	static const char zeros[ISWF_BLOCK_BYTES];
	struct iswf_place place = {.to = iswf_at(block)};
	int code = 0;
	struct iswf_mask back =
		iswf_move_runs(iswf_at(block), iswf_shadow_of(&A->blocks[block]), aside, &code);
	uint32_t run;

	for (uint32_t first = 0; (run = iswf_mask_run(empty, &first)) != 0; first += run)
		if (iswf_copy_run(&place, first, first + run, zeros) != 0)
			break;
	*met = place.met;
	iswf_mask_add(&back, &place.placed);
	return back;
}

/* False: the agent itself serves the fault. */
static bool bring_part(uint32_t page)
{
	uint32_t block = page / ISWF_BLOCK_PAGES;
	uint32_t first = page % ISWF_BLOCK_PAGES / part_pages * part_pages;
	struct iswf_mask part = iswf_mask_range(first, first + part_pages), aside, empty, met, back;
	struct iswf_block *b = &A->blocks[block];
	bool served;

	pthread_mutex_lock(&A->lock);
	if (b->claimed) {
		b->wanted = true;
		pthread_mutex_unlock(&A->lock);
		return true;
	}
	if (b->left || iswf_has(&b->home, page % ISWF_BLOCK_PAGES) ||
	    iswf_has(&b->hole, page % ISWF_BLOCK_PAGES)) {
		pthread_mutex_unlock(&A->lock);
		return false;
	}
	b->claimed = true;
	aside = iswf_mask_and(&part, &b->aside);
	empty = iswf_mask_without(&part, &aside);
	iswf_mask_take(&empty, &b->home);
	iswf_mask_take(&empty, &b->hole);
	pthread_mutex_unlock(&A->lock);
	back = bring(block, &aside, &empty, &met);
	pthread_mutex_lock(&A->lock);
	served = iswf_mask_any(&back) || iswf_mask_any(&met);
	iswf_mask_take(&b->aside, &back);
	aside = iswf_mask_without(&back, &aside);
	iswf_mask_add(&b->home, &back);
	b->unsure |= iswf_mask_any(&met);
	b->wanted = true;
	iswf_shadow_give(b);
	iswf_held_more(iswf_mask_count(&aside));
	iswf_release(block);
	pthread_mutex_unlock(&A->lock);
	return served;
}

void __wrap_iswf_fault(char *at)
{
	uint32_t page;

	if (iswf_is_ours(at)) {
		page = page_of(at);
		note(TOUCH, page / part_pages * part_pages, part_pages);
		if (bring_part(page))
			return;
	}
	__real_iswf_fault(at);
}

/* ------------------------------------------------------------------- allocations */

/* What the program frees goes at once: if it stayed, its next use would not fault. */
int __wrap_iswf_discard(uint32_t block, uint32_t first, uint32_t end, enum iswf_fate fate)
{
	note(fate == ISWF_ZEROS  ? ZEROS
	     : fate == ISWF_DEAD ? DEAD
				 : FREED,
	     block * ISWF_BLOCK_PAGES + first, end - first);
	return __real_iswf_discard(block, first, end, fate == ISWF_FREED ? ISWF_DEAD : fate);
}

static void note_taken(const char *at, size_t bytes, bool is_mapping)
{
	uint32_t pages = (uint32_t)((bytes + ISWF_PAGE_BYTES - 1) / ISWF_PAGE_BYTES);

	note(is_mapping ? MAPPED : TAKEN, page_of(at), pages);
}

char *__wrap_iswf_take(size_t bytes, size_t align, enum iswf_request request)
{
	char *at = __real_iswf_take(bytes, align, request);

	if (at != NULL)
		note_taken(at, bytes, request == ISWF_MAPPING);
	return at;
}

bool __wrap_iswf_resize(char *at, size_t bytes)
{
	bool done = __real_iswf_resize(at, bytes);

	if (done)
		note_taken(at, bytes, iswf_size_of_mapping(at) != 0);
	return done;
}

void __wrap_iswf_hand_back(uint32_t first, uint32_t end, bool children, enum iswf_why why)
{
	if (end > A->blocks_used)
		end = A->blocks_used;
	if (first < end)
		note(LEFT, first * ISWF_BLOCK_PAGES, (end - first) * ISWF_BLOCK_PAGES);
	__real_iswf_hand_back(first, end, children, why);
}

void __wrap_iswf_lose(uint32_t block, uint32_t first, uint32_t end)
{
	note(LEFT, block * ISWF_BLOCK_PAGES + first, end - first);
	__real_iswf_lose(block, first, end);
}

void __wrap_iswf_removed(char *from, char *end, bool unmapped, char *to)
{
	if (iswf_is_ours(from) && end > from)
		note(unmapped ? LEFT : ZEROS, page_of(from),
		     (uint32_t)((size_t)(end - from) / ISWF_PAGE_BYTES));
	__real_iswf_removed(from, end, unmapped, to);
}
