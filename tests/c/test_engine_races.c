/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Two narrow windows between threads, entered as often as two seconds allow: a slab mapped or
 * resumed just as its donor goes down, and the last user of a slab that is being unmapped.
 */
#include <sched.h>

#include "engine_fixture.h"
#include "util/util.h"

#define RUN_NS 1000000000ull
#define USERS  3u

/* A donor that swallows everything: only slabs and remotes matter here. */
static void no_submit(struct iswi_queue *queue, struct iswi_xfer *first)
{
	(void)queue;
	(void)first;
	CHECK(!"nothing is sent here");
}

static void no_op(struct iswi_queue *queue)
{
	(void)queue;
}

static const struct iswi_transport_ops no_ops = {"none", no_submit, no_op, no_op};
static struct iswi_queue no_queue = {&no_ops};

static void connect_none(isw_engine *e, uint32_t remote)
{
	struct iswi_queue *queues[] = {&no_queue};

	iswi_remote_set(e, remote, queues, 1, ISWI_REMOTE_UP);
}

static void forget_events(isw_engine *e)
{
	struct isw_event events[16];

	while (isw_engine_events(e, events, 16))
		;
}

/* ------------------------------------------------- mapping while the donor goes down */

struct meeting {
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
		connect_none(m->e, remote);
		meet(m, &round);
	}
}

static void one_round(struct meeting *m, unsigned int *round)
{
	struct isw_slab_info slabs[2];

	meet(m, round);
	for (uint32_t i = 0; i < m->rounds % 64; i++) /* not always at the same moment */
		atomic_signal_fence(memory_order_seq_cst);
	isw_slab_map(m->e, 0, m->remote, 0, m->rounds);
	isw_slab_resume(m->e, 1, 1);
	meet(m, round);
	CHECK_EQ(isw_engine_slabs(m->e, 0, 2, slabs), 2);
	CHECK(slabs[0].state == ISW_SLAB_UNMAPPED || slabs[0].state == ISW_SLAB_SUSPENDED);
	CHECK_EQ(slabs[1].state, ISW_SLAB_SUSPENDED);
	if (slabs[0].state == ISW_SLAB_SUSPENDED)
		CHECK_EQ(isw_slab_unmap(m->e, 0, m->rounds), 0);
	forget_events(m->e);
	meet(m, round);
	meet(m, round);
	/* Up again: the second slab is resumed half the time, to be suspended or resumed again. */
	if (m->rounds++ % 2)
		CHECK_EQ(isw_slab_resume(m->e, 1, 1), 0);
}

static void a_slab_is_never_mapped_to_a_donor_that_went_down(void)
{
	struct world *w = world_new(0);
	struct meeting m = {.e = w->e, .remote = ISW_NO_REMOTE, .rounds = 1};
	uint64_t end_ns = iswi_now_ns() + RUN_NS;
	unsigned int round = 0;
	pthread_t thread;

	CHECK_EQ(iswi_remote_reserve(w->e, &m.remote), 0);
	connect_none(w->e, m.remote);
	CHECK_EQ(isw_slab_map(w->e, 1, m.remote, 1, 1), 0);
	CHECK_EQ(iswi_thread_start(&thread, "breaker", breaker, &m), 0);
	while (iswi_now_ns() < end_ns)
		one_round(&m, &round);
	atomic_store(&m.stop, true);
	meet(&m, &round);
	pthread_join(thread, NULL);
	printf("%llu breaks\n", (unsigned long long)m.rounds);
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
	uint64_t word;

	while (!atomic_load(&u->stop)) {
		if (!iswi_slab_get(u->e, 0, &word))
			continue;
		atomic_fetch_add(&u->holders, 1);
		iswi_count(&u->held, 1);
		atomic_fetch_sub(&u->holders, 1);
		iswi_slab_put(u->e, 0);
	}
	return NULL;
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

static void drained_is_told_once_and_after_the_last_user(void)
{
	struct world *w = world_new(0);
	struct users u = {.e = w->e};
	uint64_t end_ns = iswi_now_ns() + RUN_NS, generation = 0;
	uint32_t remote = ISW_NO_REMOTE;
	pthread_t threads[USERS];

	CHECK_EQ(iswi_remote_reserve(w->e, &remote), 0);
	connect_none(w->e, remote);
	for (uint32_t i = 0; i < USERS; i++)
		CHECK_EQ(iswi_thread_start(&threads[i], "user", user, &u), 0);
	while (iswi_now_ns() < end_ns) {
		CHECK_EQ(isw_slab_map(w->e, 0, remote, 0, ++generation), 0);
		for (uint64_t i = 0; i < generation % 512; i++)
			atomic_signal_fence(memory_order_seq_cst);
		CHECK_EQ(isw_slab_unmap(w->e, 0, generation), 0);
		wait_drained(&u, generation);
	}
	atomic_store(&u.stop, true);
	for (uint32_t i = 0; i < USERS; i++)
		pthread_join(threads[i], NULL);
	printf("%llu mappings, %llu uses\n", (unsigned long long)generation,
	       (unsigned long long)iswi_counted(&u.held));
	CHECK(iswi_counted(&u.held));
	world_end(w);
}

int main(void)
{
	a_slab_is_never_mapped_to_a_donor_that_went_down();
	drained_is_told_once_and_after_the_last_user();
	return 0;
}
