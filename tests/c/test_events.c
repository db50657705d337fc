// SPDX-License-Identifier: Apache-2.0
/* The event ring: order, bound, the overflow mark, and when the eventfd is readable. */
#include <poll.h>
#include <pthread.h>
#include <string.h>

#include "check.h"
#include "tests.h"
#include "util/util.h"

#define PUTTERS      4
#define PUTS_EACH    20000
#define TAKE_AT_ONCE 7

static bool readable(const struct iswi_events *events)
{
	struct pollfd pollfd = {.fd = events->fd, .events = POLLIN};

	return poll(&pollfd, 1, 0) == 1;
}

static void put(struct iswi_events *events, uint32_t slab)
{
	struct isw_event event = {.kind = ISW_EVENT_BAD_PAGE, .slab = slab};

	iswi_events_put(events, &event);
}

/* A test with a ring of its own. */
#define EVENTS_TEST(name)                                                                          \
	static void name##_in(struct iswi_events *events);                                         \
	TEST(name)                                                                                 \
	{                                                                                          \
		static struct iswi_events events;                                                  \
                                                                                                   \
		CHECK_EQ(iswi_events_init(&events), 0);                                            \
		name##_in(&events);                                                                \
		iswi_events_fini(&events);                                                         \
	}                                                                                          \
	static void name##_in(struct iswi_events *events)

EVENTS_TEST(test_order_and_eventfd)
{
	struct isw_event out[8];

	CHECK(!readable(events));
	CHECK_EQ(iswi_events_take(events, out, 8), 0);
	for (uint32_t i = 0; i < 5; i++)
		put(events, i);
	CHECK(readable(events));
	CHECK_EQ(iswi_events_take(events, out, 3), 3);
	CHECK_EQ(out[2].slab, 2);
	/* What a short take leaves keeps the descriptor readable. */
	CHECK(readable(events));
	CHECK_EQ(iswi_events_take(events, out, 8), 2);
	CHECK_EQ(out[1].slab, 4);
	CHECK(!readable(events));
}

EVENTS_TEST(test_overflow_comes_last_and_once)
{
	static struct isw_event out[ISWI_EVENT_RING + 1];

	for (uint32_t i = 0; i < ISWI_EVENT_RING + 10; i++)
		put(events, i);
	CHECK_EQ(iswi_counted(&events->dropped), 10);
	CHECK_EQ(iswi_events_take(events, out, ISWI_EVENT_RING), ISWI_EVENT_RING);
	CHECK(readable(events));
	/* Not told yet: an event put now would come before the news of what was lost. */
	put(events, 7);
	CHECK_EQ(iswi_events_take(events, out, ISWI_EVENT_RING), 1);
	CHECK_EQ(out[0].kind, ISW_EVENT_OVERFLOW);
	CHECK_EQ(iswi_events_take(events, out, ISWI_EVENT_RING), 0);
	put(events, 8);
	CHECK_EQ(iswi_events_take(events, out, ISWI_EVENT_RING), 1);
	CHECK_EQ(out[0].slab, 8);
}

static void *put_many(void *opaque)
{
	for (uint32_t i = 0; i < PUTS_EACH; i++)
		put(opaque, i);
	return NULL;
}

/* Every event is either taken or counted as dropped, and a drop is announced. */
EVENTS_TEST(test_many_threads)
{
	struct isw_event out[TAKE_AT_ONCE];
	pthread_t putters[PUTTERS];
	uint64_t taken = 0, overflows = 0;

	for (int i = 0; i < PUTTERS; i++)
		CHECK_EQ(iswi_thread_start(&putters[i], "putter", put_many, events), 0);
	while (taken + iswi_counted(&events->dropped) < (uint64_t)PUTTERS * PUTS_EACH ||
	       readable(events)) {
		int count = iswi_events_take(events, out, TAKE_AT_ONCE);

		for (int i = 0; i < count; i++) {
			if (out[i].kind == ISW_EVENT_OVERFLOW)
				overflows++;
			else
				taken++;
		}
	}
	for (int i = 0; i < PUTTERS; i++)
		pthread_join(putters[i], NULL);
	CHECK_EQ(taken + iswi_counted(&events->dropped), (uint64_t)PUTTERS * PUTS_EACH);
	CHECK((overflows > 0) == (iswi_counted(&events->dropped) > 0));
}
