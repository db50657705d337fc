/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The threaded engine over RDMA, on the stub: see engine_threads.h. With ISW_TEST_RDMA_HOST on this
 * host's own devices, from that address of its to itself.
 *
 *     test_rdma_engine [MILLISECONDS [SEED]]
 */
#define OWN_MAIN
#include "engine_threads.h"
#include "tests_between.h"
#include "verbs_stub.h"

static struct world world;
static struct donor *const d = &world.donors[0];
static int live_before;

static int live(void)
{
	STUB_LOCKED();

	return stub.live;
}

static void begin(bool with_donor)
{
	live_before = live();
	engine_start(&world, 16);
	iswi_engine_verbs_set(world.engine, verbs);
	if (with_donor)
		donor_start(&world, d);
}

static void end(bool with_donor)
{
	isw_engine_destroy(world.engine);
	if (with_donor)
		isw_store_destroy(d->store);
}

#define DONOR_TEST(name) BETWEEN_TEST(name, begin(true), end(true))

/* The first connection is up, the second gets no answer: then the number is another donor's. */
DONOR_TEST(test_a_connect_that_fails_half_way_breaks_nothing_later)
{
	char ticket[ISW_TICKET_TEXT_BYTES];
	struct isw_rdma_end peers[QUEUES];
	struct isw_remote_config remote;
	struct isw_remote_info info;
	struct isw_error error = {0};
	struct isw_event event;

	CHECK_EQ(isw_remote_shutdown(world.engine, d->remote), 0);
	for (uint32_t again = 0; again < 2; again++) {
		CHECK_EQ(lease_renew(d->store, d->lease, WAIT_MS, ticket), 0);
		if (again)
			CHECK_EQ(isw_remote_destroy(world.engine, d->remote), 0);
		while (isw_engine_events(world.engine, &event, 1))
			;
		remote = remote_config(d, ticket);
		exchange(&world, d, &remote, peers);
		peers[1].number ^= 1u << 19;
		CHECK_EQ(again ? isw_remote_connect(world.engine, &remote, &d->remote, &error)
			       : isw_remote_reconnect(world.engine, d->remote, &remote, &error),
			 -ETIMEDOUT);
		remote = remote_config(d, ticket);
		CHECK_EQ(again ? isw_remote_connect(world.engine, &remote, &d->remote, &error)
			       : isw_remote_reconnect(world.engine, d->remote, &remote, &error),
			 0);
		CHECK_EQ(isw_engine_remotes(world.engine, 1, &info), 1);
		CHECK_EQ(info.state, ISWI_REMOTE_UP);
		CHECK_EQ(isw_engine_events(world.engine, &event, 1), 0);
		CHECK_EQ(isw_remote_shutdown(world.engine, d->remote), 0);
	}
}

/* Nothing is under way there that could run into it. */
DONOR_TEST(test_a_device_hears_at_once_of_a_slab_taken_by_force)
{
	struct isw_event event;
	uint64_t generation;
	uint32_t slot;

	CHECK_EQ(isw_store_map(d->store, d->lease, 0, &slot, &generation), 0);
	CHECK_EQ(isw_store_unmap(d->store, d->lease, slot, generation, 0), 0);
	for (uint32_t i = 0; !isw_engine_events(world.engine, &event, 1); i++) {
		CHECK(i < WAIT_MS);
		pause_ms(1);
	}
	CHECK_EQ(event.kind, ISW_EVENT_REMOTE_DOWN);
}

/* So that it may go; and one that failed is opened anew, however long others still use it. */
BETWEEN_TEST(test_a_device_is_open_as_long_as_it_is_used, begin(false), end(false))
{
	isw_rdma_offer *offers[3];
	struct isw_error error = {0};
	uint64_t opened;

	opened = stub.opened;
	for (uint32_t again = 0; again < 2; again++) {
		CHECK_EQ(isw_rdma_offer_make(world.engine, host, 2, 1, &offers[0], &error), 0);
		CHECK_EQ(isw_rdma_offer_make(world.engine, host, 1, 1, &offers[1], &error), 0);
		CHECK_EQ(stub.opened, opened + again + 1);
		isw_rdma_offer_destroy(offers[0]);
		isw_rdma_offer_destroy(offers[1]);
		CHECK_EQ(live(), live_before);
	}
	CHECK_EQ(isw_rdma_offer_make(world.engine, host, 1, 1, &offers[0], &error), 0);
	STUB_SET(cq_make_error, -EIO);
	CHECK_EQ(isw_rdma_offer_make(world.engine, host, 1, 1, &offers[1], &error), -EIO);
	STUB_SET(cq_make_error, 0);
	for (uint32_t i = 1; i < 3; i++)
		CHECK_EQ(isw_rdma_offer_make(world.engine, host, 1, 1, &offers[i], &error), 0);
	CHECK_EQ(stub.opened, opened + 4);
	for (uint32_t i = 0; i < 3; i++)
		isw_rdma_offer_destroy(offers[i]);
	CHECK_EQ(live(), live_before);
}

/* Nothing has to be under way for that, and over TCP it goes on. */
DONOR_TEST(test_a_device_that_is_to_be_removed_is_given_up)
{
	char ticket[ISW_TICKET_TEXT_BYTES];
	struct isw_remote_config remote;
	struct isw_error error = {0};
	struct isw_event event;

	CHECK_EQ(isw_rdma_let_go(world.engine), 0);
	STUB_SET(leaving, true);
	CHECK_EQ(isw_rdma_let_go(world.engine), 1);
	CHECK_EQ(isw_rdma_let_go(world.engine), 0);
	CHECK_EQ(isw_engine_events(world.engine, &event, 1), 1);
	CHECK_EQ(event.kind, ISW_EVENT_REMOTE_DOWN);
	CHECK_EQ(event.code, -ENODEV);
	CHECK_EQ(isw_store_rdma_let_go(d->store), 1);
	CHECK_EQ(lease_renew(d->store, d->lease, WAIT_MS, ticket), 0);
	remote = remote_config(d, ticket);
	CHECK_EQ(isw_remote_reconnect(world.engine, d->remote, &remote, &error), 0);
	CHECK_EQ(live(), live_before);
	CHECK_EQ(isw_rdma_let_go(world.engine), 0);
	CHECK_EQ(isw_engine_events(world.engine, &event, 1), 0);
	STUB_SET(leaving, false);
}

int main(int argc, char **argv)
{
	const char *address = getenv("ISW_TEST_RDMA_HOST");
	int code;

	if (address) {
		host = address;
		verbs = &iswi_verbs_system;
		return conform(argc, argv);
	}
	stub_start();
	verbs = &stub_verbs;
	run_tests();
	STUB_SET(delay_us, 20);
	code = conform(argc, argv);
	CHECK(stub.transfers && stub.staged);
	stub_stop();
	return code;
}
