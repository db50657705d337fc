/* SPDX-License-Identifier: Apache-2.0 */
/* Transfers held back while more requests are at hand: none is late for nothing, none is lost. */
#include "engine_fixture.h"

static uint32_t get_plugged(struct world *w, uint64_t page, uint64_t pages)
{
	return submit(w, ISW_SIM_READ | ISW_SIM_PLUG, page, pages, 0);
}

static uint32_t put_plugged(struct world *w, uint64_t page, uint64_t pages, uint64_t value)
{
	return submit(w, ISW_SIM_WRITE | ISW_SIM_PLUG, page, pages, value);
}

static void unplug(struct world *w)
{
	CHECK_EQ(step(w, ISW_STEP_UNPLUG, 0, 0), 1);
}

WORLD_TEST(a_lone_request_is_sent_at_once, world_holding(0, 0, 4, 10))
{
	uint32_t id = get_plugged(w, 1, 1);

	CHECK_EQ(sent(w, 0), 1);
	CHECK_EQ(step(w, ISW_STEP_UNPLUG, 0, 0), 0); /* nothing was held back */
	REPLY(w, 0, 0);
	GOT(w, id, 11);
}

WORLD_TEST(those_that_follow_leave_together, world_mapped(0))
{
	uint32_t ids[3];

	CHECK_EQ(remote_new(w), 1);
	map(w, 1, 1);
	write_settled(w, 0, 4, 10);
	write_settled(w, SLAB_PAGES, 4, 20);
	ids[0] = get_plugged(w, 0, 1);
	ids[1] = get_plugged(w, 2, 1);
	ids[2] = get_plugged(w, SLAB_PAGES + 1, 1); /* another slab, on another donor */
	CHECK_EQ(sent(w, 0), 1);
	CHECK_EQ(sent(w, 1), 0);
	CHECK_EQ(slab_of(w, 0).in_flight, 2);
	CHECK_EQ(slab_of(w, 1).in_flight, 1);
	unplug(w);
	CHECK_EQ(sent(w, 0), 2);
	CHECK_EQ(sent(w, 1), 1);
	settle(w);
	CHECK_EQ(w->got[ids[0]][0], 10);
	CHECK_EQ(w->got[ids[1]][0], 12);
	CHECK_EQ(w->got[ids[2]][0], 21);
}

WORLD_TEST(not_more_is_held_back_than_one_send_takes, world_mapped(0))
{
	uint32_t held = 0;

	write_settled(w, 0, 1, 10);
	get(w, 0, 1);
	for (uint32_t i = 0; i < 32; i++) {
		get_plugged(w, 0, 1);
		held += sent(w, 0) == 1;
	}
	CHECK_EQ(held, 31);
	CHECK_EQ(sent(w, 0), 33);
}

/* The page is overwritten while its first write is held back. */
WORLD_TEST(a_held_write_does_not_outlive_a_newer_one, world_mapped(0))
{
	uint32_t first, second;

	put(w, 7, 1, 1); /* so that the next is not alone */
	first = put_plugged(w, 3, 1, 100);
	CHECK_EQ(sent_for(w, 0, 3, ISWI_XFER_WRITE), 0);
	second = put(w, 3, 1, 200);
	CHECK_EQ(sent_for(w, 0, 3, ISWI_XFER_WRITE), 0); /* one write of a page at a time */
	unplug(w);
	CHECK_EQ(sent_for(w, 0, 3, ISWI_XFER_WRITE), 1);
	END_WELL(w, first, second);
	CHECK(is_remote_valid(w, 3));
	CHECK_EQ(donor_value(w, 0, 3), 200);
	CHECK_EQ(disk_value(w, 3), 200);
	CHECK_EQ(read_settled(w, 3), 200);
}

WORLD_TEST(a_donor_that_breaks_meanwhile_costs_nothing, world_holding(0, 0, 4, 10))
{
	uint32_t read, write;

	get(w, 0, 1);
	read = get_plugged(w, 2, 1);
	write = put_plugged(w, 5, 1, 50);
	BREAK(w, 0);
	CHECK_EQ(w->error[read], PENDING);
	unplug(w);
	READ_ENDS(w, read, 12);
	CHECK_EQ(w->error[write], 0);
	CHECK(!is_remote_valid(w, 5));
	CHECK_EQ(read_settled(w, 5), 50);
}

/* A slab is only given back when what is held for it has been sent and has ended. */
WORLD_TEST(held_transfers_hold_their_slab, world_holding(0, 0, 4, 10))
{
	get(w, 0, 1);
	get_plugged(w, 1, 1);
	unmap(w);
	REPLY(w, 0, 0);
	CHECK_EQ(w->events[ISW_EVENT_SLAB_DRAINED], 0);
	unplug(w);
	CHECK_EQ(w->events[ISW_EVENT_SLAB_DRAINED], 0);
	REPLY(w, 0, 0);
	CHECK_EQ(w->events[ISW_EVENT_SLAB_DRAINED], 1);
}
