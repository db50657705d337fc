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
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "far/agent.h"
#include "far/real.h"

#define PARK_STEP_NS   1000000
#define PARK_STEPS_MAX 1000u

#define A (&iswf_agent)

enum { SLOT_FREE, SLOT_TAKEN, SLOT_ASKED, SLOT_DONE };

/* One errand at a time; others wait for the word. */
static struct {
	atomic_uint state;
	enum iswf_errand errand;
	enum iswf_why why;
	char *at;
	size_t bytes;
	int result;
} slot;

static void futex(atomic_uint *word, int op, unsigned int value)
{
	(void)iswf_real()->syscall(SYS_futex, word, op | FUTEX_PRIVATE_FLAG, value, NULL, NULL, 0);
}

/* Nothing is taken meanwhile: a fork is under way, or it is the end. */
static void bring_all_home(enum iswf_why why)
{
	pthread_mutex_lock(&A->lock);
	if (why == ISWF_WHY_ENDED)
		A->resting = true;
	iswf_hand_back(0, A->blocks_used, true, why);
	if (why == ISWF_WHY_ENDED)
		iswf_retire();
	A->ended = A->resting;
	for (uint32_t i = 0; why == ISWF_WHY_ENDED && i < PARK_STEPS_MAX; i++) {
		if (iswf_has_ended() && A->parked == ISWF_EVICT_THREADS)
			break;
		iswf_wait(&A->room, PARK_STEP_NS); /* a drop that fails is tried for ever */
	}
	pthread_mutex_unlock(&A->lock);
	iswf_link_tell();
}

static int run(enum iswf_errand errand, char *at, size_t bytes, enum iswf_why why)
{
	/* The caller may have moved pages out of there by a call that we do not see: what is far of
	 * them has to follow before it is given up. */
	iswf_await_events();
	switch (errand) {
	case ISWF_GIVE:
		iswf_give(at);
		return 0;
	case ISWF_RESIZE:
		return iswf_resize(at, bytes);
	case ISWF_UNMAP:
		return iswf_unmap(at, bytes);
	case ISWF_DISCARD_RANGE:
		return iswf_advise(at, bytes, MADV_DONTNEED);
	case ISWF_FREE_RANGE:
		return iswf_advise(at, bytes, MADV_FREE);
	case ISWF_HAND_BACK:
		iswf_surrender(at, bytes, why);
		return 0;
	case ISWF_LAY_OVER:
		iswf_lay_over(at, bytes, why);
		return 0;
	case ISWF_ALL_HOME:
		bring_all_home(why);
		return 0;
	}
	return -EINVAL;
}

static int send_errand(enum iswf_errand errand, char *at, size_t bytes, enum iswf_why why)
{
	unsigned int state = SLOT_FREE;
	int result;

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

int iswf_do_errand(enum iswf_errand errand, char *at, size_t bytes, enum iswf_why why)
{
	sigset_t all, before;
	int err = errno, result, cancels;

	/* A thread that is cancelled while it waits would keep the lock. */
	pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &cancels);
	sigfillset(&all);
	pthread_sigmask(SIG_SETMASK, &all, &before); /* libc keeps its own out of it */
	result = iswf_stands_in_arena() ? send_errand(errand, at, bytes, why)
					: run(errand, at, bytes, why);
	pthread_sigmask(SIG_SETMASK, &before, NULL);
	pthread_setcancelstate(cancels, NULL);
	errno = err;
	return result;
}
