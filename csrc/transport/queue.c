// SPDX-License-Identifier: Apache-2.0
/* What queues with a receiver thread have in common. See queue.h first. */
#include "transport/queue.h"

#include <errno.h>
#include <sys/eventfd.h>
#include <unistd.h>

int iswi_tq_init(struct iswi_tq *tq, const struct iswi_transport_ops *ops,
		 const struct iswi_clock *clock)
{
	tq->base.ops = ops;
	tq->clock = clock != NULL ? clock : &iswi_clock_monotonic;
	tq->wake_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
	if (tq->wake_fd < 0)
		return -errno;
	pthread_mutex_init(&tq->lock, NULL);
	pthread_cond_init(&tq->quiet, NULL);
	return 0;
}

void iswi_tq_fini(struct iswi_tq *tq)
{
	close(tq->wake_fd);
	pthread_cond_destroy(&tq->quiet);
	pthread_mutex_destroy(&tq->lock);
}

void iswi_tq_begin(struct iswi_tq *tq, const struct iswi_queue_events *events,
		   uint32_t request_ms_max)
{
	tq->events = *events;
	tq->request_ns_max = request_ms_max * ISWI_TQ_NS_PER_MS;
	tq->now_ns = tq->ticked_ns = tq->clock->now_ns(tq->clock->ctx);
}

void iswi_tq_wake(struct iswi_tq *tq)
{
	uint64_t one = 1;

	/* Fails only when the counter is at its end, and then the receiver is awake anyway. */
	if (write(tq->wake_fd, &one, sizeof(one)) < 0)
		return;
}

int iswi_tq_woken(struct iswi_tq *tq)
{
	uint64_t count;

	return read(tq->wake_fd, &count, sizeof(count)) < 0 && errno != EAGAIN ? -errno : 0;
}

void iswi_tq_fail(struct iswi_tq *tq, int error)
{
	if (tq->state != ISWI_TQ_UP)
		return;
	tq->state = ISWI_TQ_FAILING;
	tq->down_error = error;
}

void iswi_tq_fail_now(struct iswi_tq *tq, int error)
{
	pthread_mutex_lock(&tq->lock);
	iswi_tq_fail(tq, error);
	pthread_mutex_unlock(&tq->lock);
}

void iswi_tq_shutdown(struct iswi_queue *queue)
{
	iswi_tq_fail_now(iswi_tq_of(queue), -ESHUTDOWN);
	iswi_tq_wake(iswi_tq_of(queue));
}

void iswi_tq_join(struct iswi_tq *tq)
{
	iswi_tq_shutdown(&tq->base);
	pthread_join(tq->thread, NULL);
	/* Every transfer was ended; a submitter may still be on its way out. */
	pthread_mutex_lock(&tq->lock);
	while (tq->users > 0)
		pthread_cond_wait(&tq->quiet, &tq->lock);
	pthread_mutex_unlock(&tq->lock);
}

bool iswi_tq_watch(struct iswi_tq *tq)
{
	bool watched = tq->watched_ns != 0 &&
		       tq->watched_ns + ISWI_TQ_LINGER_MS * ISWI_TQ_NS_PER_MS > tq->now_ns;

	tq->dozing = !watched;
	return watched;
}

uint32_t iswi_tq_wait_ms(const struct iswi_tq *tq, bool idle, bool watched)
{
	if (watched)
		return ISWI_TQ_WATCH_MS;
	if (!idle)
		return ISWI_TQ_TICK_MS;
	/* Not later than a request submitted meanwhile could miss its deadline. */
	return (uint32_t)ISWI_MAX(tq->request_ns_max / ISWI_TQ_NS_PER_MS, ISWI_TQ_TICK_MS);
}

bool iswi_tq_tick(struct iswi_tq *tq, bool watched, bool timed_out)
{
	uint64_t tick_ms = watched ? ISWI_TQ_WATCH_MS : ISWI_TQ_TICK_MS;

	tq->now_ns = tq->clock->now_ns(tq->clock->ctx);
	if (!timed_out && tq->now_ns - tq->ticked_ns < tick_ms * ISWI_TQ_NS_PER_MS)
		return false;
	tq->ticked_ns = tq->now_ns;
	return true;
}

uint32_t iswi_tq_slow_pending(struct iswi_tq *tq, struct iswi_xfer **slow, uint32_t count,
			      uint32_t max)
{
	for (struct iswi_xfer *xfer = tq->pending_first; xfer != NULL && count < max;
	     xfer = xfer->next)
		if (iswi_xfer_became_slow(xfer, tq->now_ns))
			slow[count++] = xfer;
	return count;
}
