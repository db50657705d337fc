/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Two narrow windows between threads, entered as often as two seconds allow: a slab mapped or
 * resumed just as its donor goes down, and the last user of a slab that is being unmapped.
 */
#include <sched.h>
#include <time.h>

#include "engine_fixture.h"
#include "util/util.h"

#define RUN_NS 1000000000ull
#define USERS  2u

static void forget_events(isw_engine *e)
{
	struct isw_event events[16];

	while (isw_engine_events(e, events, 16))
		;
}

/* ------------------------------------------------- mapping while the donor goes down */

struct meeting {
	const struct world *w;
	isw_engine *e;
	uint32_t remote;
	atomic_uint arrived; /* seq_cst: orders each round's steps */
	atomic_bool stop;
	uint64_t rounds;
};

/* Both threads are here; nobody goes on before the other has come. */
static void meet(struct meeting *m, unsigned int *round)
{
	*round += 2;
	atomic_fetch_add(&m->arrived, 1);
	for (uint32_t i = 0; atomic_load(&m->arrived) < *round; i++)
		if (i % 256 == 255)
			sched_yield();
}

static void *breaker(void *arg)
{
	struct meeting *m = arg;
	uint32_t remote = m->remote;
	unsigned int round = 0;

	for (;;) {
		meet(m, &round);
		if (atomic_load(&m->stop))
			return NULL;
		iswi_remote_fence(m->e, m->remote, -ECONNRESET);
		meet(m, &round);
		/* The other looks at the slabs. */
		meet(m, &round);
		CHECK_EQ(iswi_remote_reserve(m->e, &remote), 0);
		CHECK_EQ(iswi_remote_retire(m->e, remote), 0);
		connect_quiet(m->w, remote);
		meet(m, &round);
	}
}

static void one_round(struct meeting *m, unsigned int *round)
{
	struct isw_slab_info slabs[2];

	meet(m, round);
	for (uint32_t i = 0; i < m->rounds / 2 % 64; i++) /* not always at the same moment */
		atomic_signal_fence(memory_order_seq_cst);
	if (m->rounds % 2)
		isw_slab_map(m->e, 0, m->remote, 0, m->rounds);
	else
		isw_slab_resume(m->e, 1, m->remote, 1);
	meet(m, round);
	CHECK_EQ(isw_engine_slabs(m->e, 0, 2, slabs), 2);
	CHECK(slabs[0].state == ISW_SLAB_UNMAPPED || slabs[0].state == ISW_SLAB_SUSPENDED);
	CHECK_EQ(slabs[1].state, ISW_SLAB_SUSPENDED);
	if (slabs[0].state == ISW_SLAB_SUSPENDED)
		CHECK_EQ(isw_slab_unmap(m->e, 0, m->remote, m->rounds), 0);
	forget_events(m->e);
	meet(m, round);
	meet(m, round);
	m->rounds++;
}

WORLD_TEST(a_slab_is_never_mapped_to_a_donor_that_went_down, world_new(0))
{
	struct meeting m = {.w = w, .e = w->e, .rounds = 1};
	uint64_t end_ns = iswi_now_ns() + RUN_NS;
	unsigned int round = 0;
	pthread_t thread;

	m.remote = quiet_remote(w);
	CHECK_EQ(isw_slab_map(w->e, 1, m.remote, 1, 1), 0);
	CHECK_EQ(iswi_thread_start(&thread, "breaker", breaker, &m), 0);
	while (iswi_now_ns() < end_ns)
		one_round(&m, &round);
	atomic_store(&m.stop, true);
	meet(&m, &round);
	pthread_join(thread, NULL);
	printf("%llu breaks\n", (unsigned long long)m.rounds);
}

/* ------------------------------------------- reconnecting while somebody still submits */

/* A connection on which a submitter is slow; meanwhile its remote goes down and comes back. */
struct slow_queue {
	struct iswi_queue base;
	const struct world *w;
	isw_engine *e;
	pthread_t thread;
	atomic_bool in_submit; /* seq_cst */
	atomic_uint destroyed;
};

static void *come_back(void *arg)
{
	struct slow_queue *queue = arg;
	uint32_t remote = 0;

	CHECK_EQ(iswi_remote_reserve(queue->e, &remote), 0);
	CHECK_EQ(iswi_remote_retire(queue->e, remote), 0);
	connect_quiet(queue->w, remote);
	return NULL;
}

static void slow_submit(struct iswi_queue *base, struct iswi_xfer *first)
{
	struct slow_queue *queue = (struct slow_queue *)base;
	const struct timespec while_ = {.tv_nsec = 20000000};

	atomic_store(&queue->in_submit, true);
	iswi_remote_fence(queue->e, 0, -ECONNRESET);
	CHECK_EQ(iswi_thread_start(&queue->thread, "come-back", come_back, queue), 0);
	first->done(first, -ECONNRESET); /* the transfer has ended, its submitter has not */
	nanosleep(&while_, NULL);
	atomic_store(&queue->in_submit, false);
}

static void slow_destroy(struct iswi_queue *base)
{
	struct slow_queue *queue = (struct slow_queue *)base;

	CHECK(!atomic_load(&queue->in_submit));
	atomic_fetch_add(&queue->destroyed, 1);
}

TEST(a_connection_is_not_freed_under_a_submitter)
{
	static const struct iswi_transport_ops ops = {
		.name = "slow",
		.submit = slow_submit,
		.shutdown = quiet_ignore,
		.destroy = slow_destroy,
	};
	struct world *w = world_new(0);
	struct slow_queue queue = {.base = {&ops}, .w = w, .e = w->e};
	struct iswi_queue *queues[] = {&queue.base};
	uint32_t remote = ISW_NO_REMOTE, id;

	CHECK_EQ(iswi_remote_reserve(w->e, &remote), 0);
	iswi_remote_set(w->e, remote, queues, 1, ISWI_REMOTE_UP);
	map(w, 0, remote);
	id = put(w, 1, 1, 100);
	pthread_join(queue.thread, NULL);
	CHECK_EQ(atomic_load(&queue.destroyed), 1);
	disk_settle(w);
	CHECK_EQ(w->error[id], 0);
	world_end(w);
}

/* -------------------------------------------------------- unmapping a slab in use */

struct users {
	isw_engine *e;
	atomic_uint holders; /* seq_cst */
	atomic_bool stop;
	atomic_uint_fast64_t held;
};

static void *user(void *arg)
{
	struct users *u = arg;
	struct iswi_use use;
	uint64_t i = 0;

	while (!atomic_load(&u->stop)) {
		if (!iswi_slab_get(u->e, 0, &use)) {
			sched_yield();
			continue;
		}
		atomic_fetch_add(&u->holders, 1);
		iswi_count(&u->held, 1);
		/* While a slab is held, its next mapping must not end. */
		if (++i % 16 == 0)
			sched_yield();
		atomic_fetch_sub(&u->holders, 1);
		iswi_place_put(u->e, 0, use.place);
	}
	return NULL;
}

/* Until somebody has come in, mostly. */
static void let_in(struct users *u, uint64_t generation)
{
	uint64_t before = iswi_counted(&u->held);

	for (uint32_t i = 0; generation % 8 && i < 9999 && iswi_counted(&u->held) == before; i++)
		if (i % 512 == 511)
			sched_yield();
}

static void wait_drained(struct users *u, uint64_t generation)
{
	uint64_t end_ns = iswi_now_ns() + 20 * RUN_NS;
	struct isw_event event;

	while (!isw_engine_events(u->e, &event, 1)) {
		CHECK(iswi_now_ns() < end_ns); /* the last user told nobody */
		sched_yield();
	}
	CHECK_EQ(event.kind, ISW_EVENT_SLAB_DRAINED);
	CHECK_EQ(event.generation, generation);
	CHECK_EQ(atomic_load(&u->holders), 0);
	CHECK(!isw_engine_events(u->e, &event, 1));
}

WORLD_TEST(drained_is_told_once_and_after_the_last_user, world_new(0))
{
	struct users u = {.e = w->e};
	uint64_t end_ns = iswi_now_ns() + RUN_NS, generation = 0;
	uint32_t remote = quiet_remote(w);
	pthread_t threads[USERS];

	for (uint32_t i = 0; i < USERS; i++)
		CHECK_EQ(iswi_thread_start(&threads[i], "user", user, &u), 0);
	while (iswi_now_ns() < end_ns) {
		CHECK_EQ(isw_slab_map(w->e, 0, remote, 0, ++generation), 0);
		let_in(&u, generation);
		CHECK_EQ(isw_slab_unmap(w->e, 0, remote, generation), 0);
		wait_drained(&u, generation);
	}
	atomic_store(&u.stop, true);
	for (uint32_t i = 0; i < USERS; i++)
		pthread_join(threads[i], NULL);
	printf("%llu mappings, %llu uses\n", (unsigned long long)generation,
	       (unsigned long long)iswi_counted(&u.held));
	CHECK(iswi_counted(&u.held));
}
