/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What queues with a receiver thread have in common, TCP's and RDMA's alike: they embed this first.
 *
 * Any thread may submit. When something fails, whoever notices sets FAILING, after which nothing is
 * sent; the receiver thread alone goes from there to DOWN and ends every transfer. So what is
 * pending or under way stays there while that thread does something else.
 *
 * One lock, a leaf: no callback and no system call that could wait runs under it.
 */
#ifndef ISWI_TRANSPORT_QUEUE_H
#define ISWI_TRANSPORT_QUEUE_H

#include <errno.h>
#include <pthread.h>
#include <stdbool.h>

#include "transport/transport.h"
#include "util/util.h"

#define ISWI_TQ_NS_PER_MS 1000000ull
#define ISWI_TQ_NS_PER_US 1000ull

#define ISWI_TQ_TICK_MS   100 /* how late a missed deadline is noticed */
#define ISWI_TQ_WATCH_MS  5   /* how late a slow READ is noticed ... */
#define ISWI_TQ_LINGER_MS 100 /* ... while one that minds was submitted at most this long ago */

enum iswi_tq_state {
	ISWI_TQ_UP,
	ISWI_TQ_FAILING, /* nothing more is sent; submit still queues: nothing ends too early */
	ISWI_TQ_DOWN     /* submit ends transfers at once */
};

struct iswi_tq {
	struct iswi_queue base;
	struct iswi_queue_events events;
	const struct iswi_clock *clock;
	uint64_t request_ns_max;
	int wake_fd;
	pthread_t thread;

	/* Receiver thread only. */
	uint64_t now_ns; /* of its last look at the clock */
	uint64_t ticked_ns;

	pthread_mutex_t lock;
	/* Everything below is under lock, and so is what the transport adds of the kind. */
	pthread_cond_t quiet; /* users, or what else the transport waits for, fell while not UP */
	enum iswi_tq_state state;
	int down_error;
	uint32_t users; /* threads inside submit; destroy waits for them */
	struct iswi_xfer *pending_first, *pending_last;
	uint64_t watched_ns; /* when the last READ that minds being slow was submitted, or 0 */
	bool dozing;         /* the receiver thread sleeps for longer than such a READ could bear */
};

static inline struct iswi_tq *iswi_tq_of(struct iswi_queue *queue)
{
	return ISWI_CONTAINER(queue, struct iswi_tq, base);
}

/* ---- queue.c */
/* Without a thread. -errno: no descriptor to wake it by. */
int iswi_tq_init(struct iswi_tq *tq, const struct iswi_transport_ops *ops,
		 const struct iswi_clock *clock);
void iswi_tq_fini(struct iswi_tq *tq);
/* Before its thread starts. */
void iswi_tq_begin(struct iswi_tq *tq, const struct iswi_queue_events *events,
		   uint32_t request_ms_max);
void iswi_tq_wake(struct iswi_tq *tq);
/* The receiver thread has slept until this could be read. 0 or -errno. */
int iswi_tq_woken(struct iswi_tq *tq);
/* Lock held; then wake the receiver thread, unless on it. The first error stays. */
void iswi_tq_fail(struct iswi_tq *tq, int error);
/* Likewise, lock not held. */
void iswi_tq_fail_now(struct iswi_tq *tq, int error);
/* Both are members of the transports' tables, or the first half of one. */
void iswi_tq_shutdown(struct iswi_queue *queue);
/* Shuts down, waits for the receiver thread and for submitters on their way out. */
void iswi_tq_join(struct iswi_tq *tq);

/* Receiver thread, lock held: whether a READ may become slow soon. Else it may doze. */
bool iswi_tq_watch(struct iswi_tq *tq);
/* Receiver thread: how long to wait for something, at most. idle: nothing is under way. */
uint32_t iswi_tq_wait_ms(const struct iswi_tq *tq, bool idle, bool watched);
/* Receiver thread: looks at the clock. Whether it is time to look at deadlines and slow READs. */
bool iswi_tq_tick(struct iswi_tq *tq, bool watched, bool timed_out);
/* Receiver thread, lock held: adds pending READs that have become slow; returns how many there are.
 */
uint32_t iswi_tq_slow_pending(struct iswi_tq *tq, struct iswi_xfer **slow, uint32_t count,
			      uint32_t max);

/* ---- transfers */

/* Ends each of the chain; the queue may be gone as soon as the last one was ended. */
static inline void iswi_xfer_end_chain(struct iswi_xfer *xfer, int error)
{
	while (xfer != NULL) {
		struct iswi_xfer *next = xfer->next;

		xfer->done(xfer, error);
		xfer = next;
	}
}

static inline void iswi_xfer_append(struct iswi_xfer **first, struct iswi_xfer **last,
				    struct iswi_xfer *xfer)
{
	xfer->next = NULL;
	if (*first == NULL)
		*first = xfer;
	else
		(*last)->next = xfer;
	*last = xfer;
}

/* Whether it must be told when it takes long. */
static inline bool iswi_xfer_minds(const struct iswi_xfer *xfer)
{
	return xfer->kind == ISWI_XFER_READ && xfer->slow_us != 0;
}

/* Marks the transfer as told when it has become slow. It may be younger than now_ns. */
static inline bool iswi_xfer_became_slow(struct iswi_xfer *xfer, uint64_t now_ns)
{
	if (!iswi_xfer_minds(xfer) ||
	    now_ns < xfer->submitted_ns + xfer->slow_us * ISWI_TQ_NS_PER_US)
		return false;
	xfer->slow_us = 0;
	return true;
}

/*
 * submit, for a transport that says what it may send (check: 0, or the error of a transfer), takes
 * what was queued with the lock held (queued: whether send is to be called), and sends without it.
 * All three are known where this is called, and so become part of it.
 */
static inline __attribute__((always_inline)) void
iswi_tq_submit(struct iswi_tq *tq, struct iswi_xfer *xfer,
	       int (*check)(struct iswi_tq *tq, const struct iswi_xfer *xfer),
	       bool (*queued)(struct iswi_tq *tq), void (*send)(struct iswi_tq *tq))
{
	struct iswi_xfer *first = NULL, *last = NULL, *bad = NULL;
	uint64_t now_ns = tq->clock->now_ns(tq->clock->ctx);
	bool watched = false, down, wake, sender = false;

	while (xfer != NULL) {
		struct iswi_xfer *next = xfer->next;
		int error = check(tq, xfer);

		xfer->submitted_ns = now_ns;
		xfer->deadline_ns = now_ns + tq->request_ns_max;
		if (error == 0) {
			watched |= iswi_xfer_minds(xfer);
			iswi_xfer_append(&first, &last, xfer);
		} else { /* it has no deadline: its error stands there, until the others are queued
			  */
			xfer->deadline_ns = (uint64_t)-error;
			xfer->next = bad;
			bad = xfer;
		}
		xfer = next;
	}
	if (first != NULL) {
		pthread_mutex_lock(&tq->lock);
		down = tq->state == ISWI_TQ_DOWN;
		/* Only the receiver thread sees deadlines: it sleeps long where there are none. */
		wake = watched && tq->dozing && !down;
		if (watched) {
			tq->watched_ns = now_ns;
			tq->dozing = false;
		}
		if (!down) {
			if (tq->pending_first == NULL)
				tq->pending_first = first;
			else
				tq->pending_last->next = first;
			tq->pending_last = last;
			sender = queued(tq);
			/* From here on another thread may end the transfers: keeps destroy away. */
			tq->users++;
		}
		pthread_mutex_unlock(&tq->lock);
		if (sender)
			send(tq);
		if (wake)
			iswi_tq_wake(tq);
		if (down) {
			iswi_xfer_end_chain(first, -ESHUTDOWN);
		} else {
			pthread_mutex_lock(&tq->lock);
			tq->users--;
			if (tq->state != ISWI_TQ_UP)
				pthread_cond_broadcast(&tq->quiet);
			pthread_mutex_unlock(&tq->lock);
		}
	}
	while (bad != NULL) {
		struct iswi_xfer *next = bad->next;

		bad->done(bad, -(int)bad->deadline_ns);
		bad = next;
	}
}

#endif
