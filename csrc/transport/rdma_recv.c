/* SPDX-License-Identifier: Apache-2.0 */
/* The receiver thread: completions, time, and the queue's end. See rdma_internal.h first. */
#include <errno.h>
#include <poll.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "transport/rdma_internal.h"

/* Everything up to this number is done: READs are copied out, then room is given back. */
static void complete(struct iswi_rdma *rdma, uint64_t number)
{
	struct iswi_xfer *first = NULL, **link = &first;
	uint64_t head, posted, bounce_end = 0;
	bool bounced = false;

	pthread_mutex_lock(&rdma->tq.lock);
	head = rdma->head;
	posted = rdma->posted;
	pthread_mutex_unlock(&rdma->tq.lock);
	if (number < head || number >= posted)
		return; /* no device says that; pages would count as read that are not */
	/* Only this thread frees the slots of what is posted, so they stay as they are. */
	for (uint64_t i = head; i <= number; i++) {
		struct rdma_slot *slot = iswi_rdma_slot(rdma, i);

		if (slot->bounce != NULL) {
			if (slot->xfer->kind == ISWI_XFER_READ && slot->xfer->buf != NULL)
				memcpy(slot->xfer->buf, slot->bounce, slot->xfer->length);
			bounce_end = slot->bounce_end;
			bounced = true;
		}
		*link = slot->xfer;
		link = &slot->xfer->next;
	}
	*link = NULL;
	pthread_mutex_lock(&rdma->tq.lock);
	rdma->head = number + 1;
	/* As long as one of these holds bytes of the bounce ring, the ring does not start again at
	 * 0. */
	if (bounced)
		rdma->bounce_head = bounce_end;
	iswi_rdma_post_pending(rdma);
	pthread_mutex_unlock(&rdma->tq.lock);
	iswi_xfer_end_chain(first, 0);
}

/* Returns how many completions there were. */
static int reap(struct iswi_rdma *rdma)
{
	struct iswi_verbs_done done[RDMA_POLL];
	int count = rdma->verbs->poll(rdma->cq, done, RDMA_POLL);
	int last = -1;

	if (count < 0)
		iswi_tq_fail_now(&rdma->tq, count);
	for (int i = 0; i < count; i++) {
		if (done[i].error != 0) {
			if (last >= 0)
				complete(rdma, done[last].id);
			iswi_tq_fail_now(&rdma->tq, done[i].error);
			return count;
		}
		last = i;
	}
	if (last >= 0)
		complete(rdma, done[last].id);
	return count;
}

/* ---------------------------------------------------------------------------- time */

/* Only this thread ends transfers, so they stay without the lock. */
static void call_slow(struct iswi_rdma *rdma)
{
	struct iswi_xfer *slow[RDMA_POLL];
	uint32_t count = 0;

	pthread_mutex_lock(&rdma->tq.lock);
	for (uint64_t i = rdma->head; i < rdma->tail && count < RDMA_POLL; i++)
		if (iswi_xfer_became_slow(iswi_rdma_slot(rdma, i)->xfer, rdma->tq.now_ns))
			slow[count++] = iswi_rdma_slot(rdma, i)->xfer;
	count = iswi_tq_slow_pending(&rdma->tq, slow, count, RDMA_POLL);
	pthread_mutex_unlock(&rdma->tq.lock);
	/* READs land in the bounce buffer, so their own buffers have received nothing. */
	for (uint32_t i = 0; i < count; i++)
		slow[i]->slow(slow[i], 0);
}

/* Transfers are in the order of submission: only the oldest is looked at. */
static void check_deadline(struct iswi_rdma *rdma)
{
	const struct iswi_xfer *oldest;

	pthread_mutex_lock(&rdma->tq.lock);
	oldest = rdma->head < rdma->tail ? iswi_rdma_slot(rdma, rdma->head)->xfer
					 : rdma->tq.pending_first;
	if (oldest != NULL && oldest->deadline_ns <= rdma->tq.now_ns)
		iswi_tq_fail(&rdma->tq, -ETIMEDOUT);
	pthread_mutex_unlock(&rdma->tq.lock);
}

static void tick(struct iswi_rdma *rdma, bool watched)
{
	if (!iswi_tq_tick(&rdma->tq, watched, false))
		return;
	call_slow(rdma);
	check_deadline(rdma);
}

/* Whether to look once more before sleeping; learns how long that pays. */
static bool spin(struct iswi_rdma *rdma, bool busy)
{
	uint64_t now_ns;

	if (!busy || rdma->spin_ns_max == 0)
		return false;
	now_ns = iswi_now_ns();
	if (rdma->spin_until_ns == 0)
		rdma->spin_until_ns = now_ns + rdma->spin_ns;
	if (now_ns < rdma->spin_until_ns)
		return true;
	/* In vain: the device is slower than that, or needs this processor. */
	rdma->spin_ns /= 2;
	if (rdma->spin_ns < RDMA_SPIN_NS_MIN)
		rdma->spin_ns = 0;
	if (++rdma->sleeps % RDMA_SPIN_TRY_EVERY == 0)
		rdma->spin_ns = rdma->spin_ns_max;
	rdma->spin_until_ns = 0;
	return false;
}

static void found(struct iswi_rdma *rdma)
{
	if (rdma->spin_until_ns != 0) /* by looking again */
		rdma->spin_ns =
			ISWI_MIN(ISWI_MAX(rdma->spin_ns * 2, RDMA_SPIN_NS_MIN), rdma->spin_ns_max);
	rdma->spin_until_ns = 0;
}

static void doze(struct iswi_rdma *rdma, int timeout_ms)
{
	int code;
	struct pollfd fds[2] = {
		{.fd = rdma->cq_fd, .events = POLLIN},
		{.fd = rdma->tq.wake_fd, .events = POLLIN},
	};

	if (poll(fds, 2, timeout_ms) < 0 && errno != EINTR)
		iswi_tq_fail_now(&rdma->tq, -errno);
	if ((fds[0].revents & (POLLERR | POLLHUP | POLLNVAL)) != 0)
		iswi_tq_fail_now(
			&rdma->tq,
			-EIO); /* the device was removed; its descriptor would stay readable */
	if (fds[1].revents != 0 && (code = iswi_tq_woken(&rdma->tq)) < 0)
		iswi_tq_fail_now(&rdma->tq, code);
}

/* Waits for something to do and does it. */
static void receiver_round(struct iswi_rdma *rdma, bool busy, bool watched)
{
	int code;

	if (reap(rdma) != 0) {
		found(rdma);
		tick(rdma, watched);
		return;
	}
	if (spin(rdma, busy))
		return;
	code = rdma->verbs->arm(rdma->cq);
	if (code != 0)
		iswi_tq_fail_now(&rdma->tq, code);
	/* A completion from before the queue was armed makes no descriptor readable. */
	else if (reap(rdma) == 0)
		doze(rdma, (int)iswi_tq_wait_ms(&rdma->tq, !busy, watched));
	tick(rdma, watched);
}

/* ----------------------------------------------------------------------------- end */

/*
 * Frees the queue pair, after which the device touches our buffers no more. A device that cannot
 * free it (none is known) gets the time to flush it. What it could still send then are bytes of
 * staging, to a donor that is fenced before its slabs are used again.
 */
static void end_queue_pair(struct iswi_rdma *rdma)
{
	const struct timespec pause = {.tv_nsec = 1000000};
	struct iswi_verbs_done done[RDMA_POLL];
	uint64_t flushed = 0;

	if (rdma->verbs->qp_free(rdma->qp) == 0) {
		rdma->qp = NULL;
		return;
	}
	for (uint32_t ms = 0; ms < RDMA_FLUSH_MS && flushed < rdma->posted; ms++) {
		int count = rdma->verbs->poll(rdma->cq, done, RDMA_POLL);

		for (int i = 0; i < count; i++)
			flushed = done[i].id + 1;
		if (count <= 0)
			nanosleep(&pause, NULL);
	}
}

/* FAILING → DOWN. */
static void go_down(struct iswi_rdma *rdma)
{
	struct iswi_xfer *first;
	int error;

	pthread_mutex_lock(&rdma->tq.lock);
	error = rdma->tq.down_error;
	pthread_mutex_unlock(&rdma->tq.lock);
	rdma->verbs->qp_fail(rdma->qp);
	rdma->tq.events.down(rdma->tq.events.ctx, error);
	end_queue_pair(rdma); /* the state is FAILING, so nobody posts */
	pthread_mutex_lock(&rdma->tq.lock);
	rdma->tq.state = ISWI_TQ_DOWN;
	first = iswi_rdma_take_all(rdma);
	pthread_mutex_unlock(&rdma->tq.lock);
	iswi_xfer_end_chain(first, error);
}

void *iswi_rdma_receiver(void *arg)
{
	struct iswi_rdma *rdma = arg;

	for (;;) {
		bool up, busy, watched;

		pthread_mutex_lock(&rdma->tq.lock);
		up = rdma->tq.state == ISWI_TQ_UP;
		busy = rdma->head < rdma->tail || rdma->tq.pending_first != NULL;
		watched = iswi_tq_watch(&rdma->tq);
		pthread_mutex_unlock(&rdma->tq.lock);
		if (!up)
			break;
		receiver_round(rdma, busy, watched);
	}
	go_down(rdma);
	return NULL;
}
