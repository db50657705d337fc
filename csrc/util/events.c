// SPDX-License-Identifier: Apache-2.0
#include "util/util.h"

#include <errno.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

int iswi_events_init(struct iswi_events *events)
{
	int err;

	memset(events, 0, sizeof(*events));
	atomic_init(&events->dropped, 0);
	events->fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
	if (events->fd < 0)
		return -errno;
	err = pthread_mutex_init(&events->lock, NULL);
	if (err != 0) {
		close(events->fd);
		events->fd = -1;
	}
	return -err;
}

void iswi_events_fini(struct iswi_events *events)
{
	pthread_mutex_destroy(&events->lock);
	close(events->fd);
	events->fd = -1;
}

/* The counter cannot overflow its 64 bits, so the only refusal (EAGAIN) means readable already. */
static void signal_reader(struct iswi_events *events)
{
	uint64_t one = 1;
	ssize_t done = write(events->fd, &one, sizeof(one));

	(void)done;
}

void iswi_events_put(struct iswi_events *events, const struct isw_event *event)
{
	pthread_mutex_lock(&events->lock);
	/* After a drop nothing is added until the reader was told: OVERFLOW keeps its place. */
	if (events->used == ISWI_EVENT_RING || events->overflow) {
		events->overflow = true;
		iswi_count(&events->dropped, 1);
	} else {
		events->ring[(events->head + events->used) % ISWI_EVENT_RING] = *event;
		events->used++;
	}
	pthread_mutex_unlock(&events->lock);
	signal_reader(events);
}

int iswi_events_take(struct iswi_events *events, struct isw_event *events_out, uint32_t max)
{
	uint64_t count;
	uint32_t taken = 0;
	bool more;
	ssize_t done;

	/* Drained before looking: an event added in between signals again. */
	done = read(events->fd, &count, sizeof(count));
	(void)done;
	pthread_mutex_lock(&events->lock);
	while (taken < max && events->used > 0) {
		events_out[taken++] = events->ring[events->head];
		events->head = (events->head + 1) % ISWI_EVENT_RING;
		events->used--;
	}
	if (taken < max && events->overflow) {
		events_out[taken++] = (struct isw_event){.kind = ISW_EVENT_OVERFLOW};
		events->overflow = false;
	}
	more = events->used > 0 || events->overflow;
	pthread_mutex_unlock(&events->lock);
	if (more)
		signal_reader(events);
	return (int)taken;
}
