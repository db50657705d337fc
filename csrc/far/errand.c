/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What a program's thread asks of the agent. A thread whose stack is in the arena could miss a page
 * of it while it holds the lock (F7), so a thread of ours does its errand meanwhile.
 */
#define _GNU_SOURCE 1
#include <errno.h>
#include <linux/futex.h>
#include <pthread.h>
#include <signal.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "far/agent.h"
#include "far/real.h"

enum { SLOT_FREE, SLOT_TAKEN, SLOT_ASKED, SLOT_DONE };

/* One errand at a time; others wait for the word. */
static struct {
	atomic_uint state;
	enum iswf_errand errand;
	enum iswf_why why;
	char *at;
	size_t bytes;
	bool result;
} slot;

#define A (&iswf_agent)

static void futex(atomic_uint *word, int op, unsigned int value)
{
	(void)iswf_real()->syscall(SYS_futex, word, op | FUTEX_PRIVATE_FLAG, value, NULL, NULL, 0);
}

/* The blocks that [at, at + bytes) touches. */
static void hand_back(char *at, size_t bytes, enum iswf_why why)
{
	uint32_t first = (uint32_t)((at - A->arena) / ISWF_BLOCK_BYTES);
	uint32_t end = (uint32_t)((at + bytes - 1 - A->arena) / ISWF_BLOCK_BYTES) + 1;

	pthread_mutex_lock(&A->lock);
	iswf_hand_back(first, end < A->blocks_count ? end : A->blocks_count, true, why);
	pthread_mutex_unlock(&A->lock);
}

/* Nothing is taken meanwhile: a fork is under way, or it is the end. */
static void bring_all_home(enum iswf_why why)
{
	pthread_mutex_lock(&A->lock);
	if (why == ISWF_WHY_ENDED)
		A->resting = true;
	iswf_hand_back(0, A->blocks_count, true, why);
	pthread_mutex_unlock(&A->lock);
}

static void discard_range(char *at, size_t bytes)
{
	uint64_t page = (uint64_t)(at - A->arena) / ISWF_PAGE_BYTES;
	uint64_t end = page + (bytes + ISWF_PAGE_BYTES - 1) / ISWF_PAGE_BYTES;

	pthread_mutex_lock(&A->lock);
	while (page < end) {
		uint32_t block = (uint32_t)(page / ISWF_BLOCK_PAGES);
		uint64_t stop = (block + 1ull) * ISWF_BLOCK_PAGES;

		if (stop > end)
			stop = end;
		iswf_discard(block, (uint32_t)(page % ISWF_BLOCK_PAGES),
			     (uint32_t)(stop - block * (uint64_t)ISWF_BLOCK_PAGES), false);
		page = stop;
	}
	pthread_mutex_unlock(&A->lock);
}

static bool run(enum iswf_errand errand, char *at, size_t bytes, enum iswf_why why)
{
	switch (errand) {
	case ISWF_GIVE:
		iswf_give(at);
		return true;
	case ISWF_GIVE_PART:
		iswf_give_part(at, bytes);
		return true;
	case ISWF_RESIZE:
		return iswf_resize(at, bytes);
	case ISWF_HAND_BACK:
		hand_back(at, bytes, why);
		return true;
	case ISWF_DISCARD_RANGE:
		discard_range(at, bytes);
		return true;
	case ISWF_ALL_HOME:
		bring_all_home(why);
		return true;
	}
	return false;
}

static bool send_errand(enum iswf_errand errand, char *at, size_t bytes, enum iswf_why why)
{
	unsigned int state = SLOT_FREE;
	bool result;

	while (!atomic_compare_exchange_strong(&slot.state, &state, SLOT_TAKEN)) {
		futex(&slot.state, FUTEX_WAIT, state);
		state = SLOT_FREE;
	}
	slot.errand = errand;
	slot.why = why;
	slot.at = at;
	slot.bytes = bytes;
	atomic_store(&slot.state, SLOT_ASKED);
	futex(&slot.state, FUTEX_WAKE, INT32_MAX);
	while ((state = atomic_load(&slot.state)) != SLOT_DONE)
		futex(&slot.state, FUTEX_WAIT, state);
	result = slot.result;
	atomic_store(&slot.state, SLOT_FREE);
	futex(&slot.state, FUTEX_WAKE, INT32_MAX);
	return result;
}

void *iswf_errand_main(void *arg)
{
	(void)arg;
	for (;;) {
		unsigned int state = atomic_load(&slot.state);

		if (state != SLOT_ASKED) {
			futex(&slot.state, FUTEX_WAIT, state);
			continue;
		}
		slot.result = run(slot.errand, slot.at, slot.bytes, slot.why);
		atomic_store(&slot.state, SLOT_DONE);
		futex(&slot.state, FUTEX_WAKE, INT32_MAX);
	}
	return NULL;
}

/* errno is one of the thread-local variables, which lie on a stack that was made there. */
bool iswf_stands_in_arena(void)
{
	return iswf_is_ours(__builtin_frame_address(0)) || iswf_is_ours(&errno);
}

bool iswf_do_errand(enum iswf_errand errand, char *at, size_t bytes, enum iswf_why why)
{
	sigset_t all, before;
	int err = errno;
	bool result;

	sigfillset(&all);
	pthread_sigmask(SIG_SETMASK, &all, &before); /* libc keeps its own out of it */
	result = iswf_stands_in_arena() ? send_errand(errand, at, bytes, why)
					: run(errand, at, bytes, why);
	pthread_sigmask(SIG_SETMASK, &before, NULL);
	errno = err;
	return result;
}
