/* SPDX-License-Identifier: Apache-2.0 */
/* Mapping, unmapping, suspending: who may use a donor, and from when to when. */
#include "engine_fixture.h"

static uint64_t generation_of(const struct world *w, uint32_t slab)
{
	return slab_of(w, slab).generation;
}

WORLD_TEST(drained_only_after_the_last_transfer, world_holding(0, 1, 1, 100))
{
	uint32_t read;

	put(w, 2, 1, 200);
	put(w, 5, 1, 500);
	read = get(w, 1, 1);
	CHECK_EQ(slab_of(w, 0).in_flight, 3);
	unmap(w);
	CHECK_EQ(slab_of(w, 0).state, ISW_SLAB_DRAINING);
	for (uint32_t left = 3; left; left--) {
		CHECK_EQ(w->events[ISW_EVENT_SLAB_DRAINED], 0);
		CHECK_EQ(slab_of(w, 0).in_flight, left);
		if (left == 2)
			REFUSE(w, 0, 0); /* however it ends */
		else
			REPLY(w, 0, 0);
	}
	CHECK_EQ(w->events[ISW_EVENT_SLAB_DRAINED], 1);
	CHECK_EQ(w->last[ISW_EVENT_SLAB_DRAINED].slab, 0);
	CHECK_EQ(w->last[ISW_EVENT_SLAB_DRAINED].generation, w->generations);
	CHECK_EQ(slab_of(w, 0).state, ISW_SLAB_UNMAPPED);
	CHECK_EQ(slab_of(w, 0).remote, ISW_NO_REMOTE);
	CHECK_EQ(slab_of(w, 0).remote_valid_pages, 0);
	READ_ENDS(w, read, 100);
	CHECK_EQ(read_settled(w, 2), 200);
}

WORLD_TEST(nothing_new_is_sent_to_a_draining_slab, world_holding(0, 3, 1, 300))
{
	uint32_t newer, read;

	put(w, 1, 1, 100);
	newer = put(w, 1, 1, 101); /* waits for the first to end, then must not be sent */
	unmap(w);
	put(w, 2, 1, 200);
	read = get(w, 3, 1);
	CHECK_EQ(sent(w, 0), 1);
	REPLY(w, 0, 0);
	CHECK_EQ(sent(w, 0), 0);
	CHECK_EQ(w->events[ISW_EVENT_SLAB_DRAINED], 1);
	CHECK_EQ(w->error[newer], PENDING);
	END_WELL(w, newer);
	CHECK_EQ(w->got[read][0], 300);
	CHECK_EQ(read_settled(w, 1), 101);
}

WORLD_TEST(another_mappings_bits_are_not_believed, world_holding(0, 1, 1, 100))
{
	unmap(w);
	CHECK_EQ(step(w, ISW_STEP_REMOTE_WIPE, 0, 0), 1);
	map(w, 0, 0);
	CHECK_EQ(read_settled(w, 1), 100);
	CHECK_EQ(stats_of(w).pages_in_remote, 0);
	CHECK_EQ(stats_of(w).crc_errors_remote, 0);
	/* In its new place it gets valid by a write. */
	write_settled(w, 1, 1, 200);
	CHECK(is_remote_valid(w, 1));
}

WORLD_TEST(unmap_names_the_generation_it_means, world_mapped(0))
{
	uint64_t generation = generation_of(w, 0);

	CHECK_EQ(isw_slab_unmap(w->e, 0, 0, generation + 1), -ESTALE);
	CHECK_EQ(isw_slab_unmap(w->e, 0, 0, generation - 1), -ESTALE);
	CHECK_EQ(slab_of(w, 0).state, ISW_SLAB_MAPPED);
	CHECK_EQ(isw_slab_unmap(w->e, 0, 0, generation), 0);
	CHECK_EQ(isw_slab_unmap(w->e, 0, 0, generation), -EINVAL); /* not twice */
	CHECK_EQ(isw_slab_unmap(w->e, SLABS, 0, generation), -EINVAL);
	CHECK_EQ(isw_slab_map(w->e, SLABS, 0, 0, 9), -EINVAL);
	CHECK_EQ(isw_slab_map(w->e, 0, 99, 0, 9), -EINVAL);
}

WORLD_TEST(a_slab_has_one_mapping, world_mapped(0))
{
	CHECK_EQ(isw_slab_map(w->e, 0, 0, 1, 9), -EBUSY);
	put(w, 1, 1, 100);
	unmap(w);
	CHECK_EQ(isw_slab_map(w->e, 0, 0, 1, 9), -EBUSY); /* still draining */
	BREAK(w, 0);
	CHECK_EQ(slab_of(w, 0).state, ISW_SLAB_UNMAPPED); /* a broken connection ends it, too */
	CHECK_EQ(w->events[ISW_EVENT_SLAB_DRAINED], 1);
}

WORLD_TEST(no_slab_is_mapped_to_a_donor_that_is_down, world_mapped(0))
{
	CHECK_EQ(isw_slab_map(w->e, 1, 1, 1, 9), -ENOTCONN); /* never connected */
	BREAK(w, 0);
	CHECK_EQ(isw_slab_map(w->e, 1, 0, 1, 9), -ENOTCONN);
	CHECK_EQ(slab_of(w, 1).state, ISW_SLAB_UNMAPPED);
	CHECK_EQ(isw_slab_resume(w->e, 0, 0, generation_of(w, 0)), -ENOTCONN);
	CHECK_EQ(slab_of(w, 0).state, ISW_SLAB_SUSPENDED);
	reconnect(w, 0);
	CHECK_EQ(isw_slab_resume(w->e, 0, 0, generation_of(w, 0) + 1), -ESTALE);
	CHECK_EQ(isw_slab_resume(w->e, 1, 0, 0), -ESTALE);
	resume(w, 0);
	CHECK_EQ(slab_of(w, 0).state, ISW_SLAB_MAPPED);
	CHECK_EQ(isw_slab_resume(w->e, 0, 0, generation_of(w, 0)), -EINVAL);
}

WORLD_TEST(a_broken_donor_suspends_its_slabs_and_no_others, world_mapped(0))
{
	CHECK_EQ(remote_new(w), 1);
	map(w, 1, 1);
	map(w, 2, 0);
	BREAK(w, 0);
	CHECK_EQ(slab_of(w, 0).state, ISW_SLAB_SUSPENDED);
	CHECK_EQ(slab_of(w, 1).state, ISW_SLAB_MAPPED);
	CHECK_EQ(slab_of(w, 2).state, ISW_SLAB_SUSPENDED);
	CHECK_EQ(slab_of(w, 3).state, ISW_SLAB_UNMAPPED);
	CHECK_EQ(w->events[ISW_EVENT_REMOTE_DOWN], 1);
	CHECK_EQ(w->last[ISW_EVENT_REMOTE_DOWN].remote, 0);
	CHECK_EQ(w->last[ISW_EVENT_REMOTE_DOWN].code, -ECONNRESET);
}

WORLD_TEST(a_shutdown_on_purpose_is_like_a_break, world_mapped(0))
{
	uint32_t id = put(w, 1, 1, 100);

	CHECK_EQ(isw_remote_shutdown(w->e, 0), 0);
	reap(w);
	CHECK_EQ(slab_of(w, 0).state, ISW_SLAB_SUSPENDED);
	CHECK_EQ(slab_of(w, 0).in_flight, 0);
	CHECK_EQ(w->events[ISW_EVENT_REMOTE_DOWN], 1);
	CHECK_EQ(w->events[ISW_EVENT_SLAB_ERROR], 0); /* it is the way, not the slab */
	CHECK_EQ(isw_remote_shutdown(w->e, 0), 0);
	reap(w);
	CHECK_EQ(w->events[ISW_EVENT_REMOTE_DOWN], 1);
	END_WELL(w, id);
	CHECK_EQ(isw_remote_shutdown(w->e, 99), -EINVAL);
}

WORLD_TEST(a_suspended_slab_is_unmapped_like_any, world_holding(0, 1, 1, 100))
{
	BREAK(w, 0);
	CHECK(is_remote_valid(w, 1)); /* kept, in case the donor comes back ... */
	unmap(w);
	CHECK_EQ(w->events[ISW_EVENT_SLAB_DRAINED], 1);
	CHECK(!is_remote_valid(w, 1)); /* ... and given up here */
	CHECK_EQ(read_settled(w, 1), 100);
}

WORLD_TEST(a_remote_is_destroyed_when_nothing_is_mapped_there, world_mapped(0))
{
	CHECK_EQ(isw_remote_destroy(w->e, 0), -EBUSY);
	CHECK_EQ(remote_of(w, 0).state, 1);
	CHECK_EQ(remote_of(w, 0).queues, 2);
	CHECK_EQ(remote_of(w, 1).state, 0);
	BREAK(w, 0);
	CHECK_EQ(isw_remote_destroy(w->e, 0), -EBUSY); /* suspended there */
	unmap(w);
	CHECK_EQ(isw_remote_destroy(w->e, 0), 0);
	CHECK_EQ(remote_of(w, 0).state, 0);
	CHECK_EQ(isw_remote_destroy(w->e, 0), -EBUSY); /* there is none */
	CHECK_EQ(isw_remote_destroy(w->e, 99), -EINVAL);
}

WORLD_TEST(what_is_in_flight_at_a_donor_is_shown, world_mapped(0))
{
	put(w, 1, 2, 100);
	put(w, 5, 1, 100);
	CHECK_EQ(remote_of(w, 0).in_flight, 2);
	CHECK_EQ(remote_of(w, 0).write_pages, 0); /* none is answered yet */
	remotes_settle(w);
	CHECK_EQ(remote_of(w, 0).in_flight, 0);
	CHECK_EQ(remote_of(w, 0).write_pages, 3);
	CHECK_EQ(remote_of(w, 0).rdma_write_pages, 0);
}

static uint64_t sum_of(const uint64_t *buckets)
{
	uint64_t sum = 0;

	for (uint32_t i = 0; i < ISW_LATENCY_BUCKETS; i++)
		sum += buckets[i];
	return sum;
}

WORLD_TEST(what_a_donor_answered_is_not_the_next_donors, world_mapped(0))
{
	put(w, 1, 2, 100); /* one transfer of two pages, ... */
	remotes_settle(w);
	put(w, 5, 1, 100); /* ... and one that is not answered */
	BREAK(w, 0);
	CHECK_EQ(remote_of(w, 0).write_pages, 2);
	CHECK_EQ(remote_of(w, 0).errors, 1);
	CHECK_EQ(sum_of(stats_of(w).remote_write_latency), 1);
	CHECK_EQ(sum_of(stats_of(w).remote_read_latency), 0);
	unmap(w);
	CHECK_EQ(isw_remote_destroy(w->e, 0), 0);
	CHECK_EQ(remote_new(w), 0); /* its number is another donor's now */
	CHECK_EQ(remote_of(w, 0).write_pages, 0);
	CHECK_EQ(remote_of(w, 0).errors, 0);
	CHECK_EQ(sum_of(stats_of(w).remote_write_latency), 1); /* of all donors there were */
}

/* A donor that dies exactly when a slab is mapped to it, from inside what its death ends. */
struct map_inside {
	struct iswi_req req;
	struct world *w;
	int code;
};

static void map_when_done(struct iswi_req *req, int error)
{
	struct map_inside *inside = ISWI_CONTAINER(req, struct map_inside, req);

	CHECK_EQ(error, -EIO);
	inside->code = isw_slab_map(inside->w->e, 1, 0, 1, 99);
}

WORLD_TEST(a_donor_that_dies_is_down_before_its_transfers_end, world_mapped(ISW_ENGINE_NO_BACKUP))
{
	static unsigned char data[ISW_PAGE_BYTES];
	struct map_inside inside = {.w = w, .code = 1};

	inside.req.op = ISWI_WRITE;
	inside.req.length = ISW_PAGE_BYTES;
	inside.req.data = data;
	inside.req.done = map_when_done;
	iswi_engine_submit(w->e, &inside.req);
	BREAK(w, 0);
	CHECK_EQ(inside.code, -ENOTCONN);
	CHECK_EQ(slab_of(w, 0).state, ISW_SLAB_SUSPENDED);
	CHECK_EQ(slab_of(w, 1).state, ISW_SLAB_UNMAPPED);
}

/* A connection that broke before its remote was UP could not suspend anything. */
WORLD_TEST(a_connection_that_breaks_during_connect_is_noticed, world_mapped(0))
{
	struct iswi_remote *r = &w->e->remotes[0];
	uint32_t remote = 0;

	BREAK(w, 0);
	CHECK_EQ(iswi_remote_reserve(w->e, &remote), 0);
	CHECK_EQ(iswi_remote_retire(w->e, 0), 0);
	r->events.down(r->events.ctx, -ECONNRESET); /* the new queue, at once */
	reap(w);
	CHECK_EQ(w->events[ISW_EVENT_REMOTE_DOWN], 1);
	connect_quiet(w, 0);
	reap(w);
	CHECK_EQ(w->events[ISW_EVENT_REMOTE_DOWN], 2);
	CHECK_EQ(isw_slab_resume(w->e, 0, 0, generation_of(w, 0)), -ENOTCONN);
	donor_returns(w, 0); /* and is forgotten with its queue */
	write_settled(w, 1, 1, 100);
	CHECK(is_remote_valid(w, 1));
}
