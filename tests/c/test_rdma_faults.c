/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The RDMA transport when something breaks: the queue goes down first, each transfer ends once, and
 * nobody touches a buffer after that. On the stub.
 */
#include "rdma_fixture.h"

static char page[ISW_PAGE_BYTES], other[ISW_PAGE_BYTES];

static void run_into(enum iswi_xfer_kind kind, int error)
{
	struct op ops[4];

	for (uint32_t i = 0; i < 4; i++)
		rig_op(&ops[i], kind, 0, i, page);
	/* At once: one that comes after the first has failed finds a queue that is down. */
	ops_submit(ops, 4);
	CHECK_EQ(client_wait_down(&rig.client), error);
	ops_await(ops, 4, error);
	CHECK_EQ(rig_do(kind, 0, 0, page), -ESHUTDOWN);
}

static const enum iswi_xfer_kind kinds[] = {ISWI_XFER_READ, ISWI_XFER_WRITE};

/* A deadline ends our wait; nothing that the donor does later is seen. */
TEST_CASES(test_silence_ends_with_the_deadline, 2, kind)
{
	rig_start((struct rig){.request_ms_max = 200});
	STUB_SET(frozen, true);
	memset(page, 0x11, sizeof(page));
	memset(rig.memory, 0x22, RIG_SLAB_BYTES);
	run_into(kinds[kind], -ETIMEDOUT);
	STUB_SET(frozen, false);
	usleep(20000);
	CHECK(all_bytes(page, 0x11, sizeof(page)));
	CHECK(all_bytes(rig.memory, 0x22, 4 * ISW_PAGE_BYTES));
	rig_stop();
}

TEST_CASES(test_a_dead_key_ends_the_queue, 2, kind)
{
	rig_start((struct rig){0});
	rig_fence();
	run_into(kinds[kind], -EACCES);
	CHECK_EQ(rig.memory[0], 0);
	rig_stop();
}

RIG_TEST(test_the_peers_end_ends_the_queue)
{
	CHECK_EQ(rig_verbs()->qp_free(rig.qp), 0);
	rig.qp = NULL;
	run_into(ISWI_XFER_READ, -ETIMEDOUT);
}

RIG_TEST(test_a_post_that_fails_ends_the_queue)
{
	struct op ops[3];

	STUB_SET(frozen, true);
	STUB_SET(post_error, -ENOMEM);
	for (uint32_t i = 0; i < 3; i++)
		rig_op(&ops[i], ISWI_XFER_WRITE, 0, i, page);
	ops_submit(ops, 3);
	CHECK_EQ(client_wait_down(&rig.client), -ENOMEM);
	ops_await(ops, 3, -ENOMEM);
	STUB_SET(frozen, false);
}

/* One of many fails: those before it are done, it and those behind it are not. */
RIG_TEST(test_an_error_in_the_middle)
{
	struct op ops[8];

	for (uint32_t i = 0; i < 8; i++) {
		rig_op(&ops[i], ISWI_XFER_READ, 0, i, page);
		if (i < 4)
			CHECK_EQ(op_run(&ops[i]), 0);
	}
	STUB_SET(frozen, true);
	for (uint32_t i = 4; i < 8; i++)
		op_submit(&ops[i]);
	STUB_SET(transfer_error, -EIO);
	STUB_SET(frozen, false);
	CHECK_EQ(client_wait_down(&rig.client), -EIO);
	ops_await(ops + 4, 4, -EIO);
}

RIG_TEST(test_a_queue_pair_that_stays_does_not_hang_us, .request_ms_max = 200)
{
	STUB_SET(frozen, true);
	STUB_SET(qp_free_error, -EBUSY);
	run_into(ISWI_XFER_WRITE, -ETIMEDOUT);
	STUB_SET(qp_free_error, 0);
	STUB_SET(frozen, false);
}

TEST(test_shutdown_and_destroy_with_much_in_flight)
{
	struct op ops[40];

	rig_start((struct rig){0});
	STUB_SET(frozen, true);
	for (uint32_t i = 0; i < 40; i++) {
		rig_op(&ops[i], kinds[i % 2], 0, i, page);
		op_submit(&ops[i]);
	}
	client_shutdown(&rig.client);
	client_shutdown(&rig.client);
	CHECK_EQ(client_wait_down(&rig.client), -ESHUTDOWN);
	rig_stop();
	for (uint32_t i = 0; i < 40; i++)
		CHECK_EQ(ops[i].error, -ESHUTDOWN);
	STUB_SET(frozen, false);
}

/* Its descriptor is readable for ever then: nobody must spin on that. */
RIG_TEST(test_a_device_that_was_removed_ends_an_idle_queue, .request_ms_max = 100)
{
	int ends[2];

	CHECK_EQ(pipe(ends), 0);
	close(ends[1]);
	for (uint32_t i = 0; i < STUB_QPS; i++) {
		STUB_LOCKED();

		if (stub.qps[i] != NULL && stub.qps[i]->cq->fd >= 0)
			CHECK(dup2(ends[0], stub.qps[i]->cq->fd) >= 0);
	}
	close(ends[0]);
	CHECK_EQ(client_wait_down(&rig.client), -EIO);
}

/* -------------------------------------------------------------------- slow READs */

static struct {
	struct iswi_xfer *xfer;
	void *to;
	atomic_uint calls;
} slowed;

static void exchange(struct iswi_xfer *xfer, uint32_t received)
{
	CHECK_EQ(received, 0);
	slowed.xfer = xfer;
	xfer->buf = slowed.to;
	atomic_fetch_add(&slowed.calls, 1);
}

/* dropped: it gets none. */
static void slow_read(bool dropped)
{
	struct op op;

	atomic_store(&slowed.calls, 0);
	slowed.to = dropped ? NULL : other;

	memset(rig.memory, 0x55, ISW_PAGE_BYTES);
	memset(page, 1, sizeof(page));
	memset(other, 2, sizeof(other));
	STUB_SET(frozen, true);
	rig_op(&op, ISWI_XFER_READ, 0, 0, page);
	op.xfer.slow = exchange;
	op.xfer.slow_us = 1000;
	op_submit(&op);
	WAIT_FOR(atomic_load(&slowed.calls) > 0);
	STUB_SET(frozen, false);
	ops_await(&op, 1, 0);
	CHECK_EQ(atomic_load(&slowed.calls), 1);
	CHECK(slowed.xfer == &op.xfer);
	CHECK_EQ(other[0], dropped ? 2 : 0x55);
	CHECK_EQ(page[0], 1);
}

RIG_TEST(test_a_slow_read_may_get_another_buffer)
{
	slow_read(false);
}

RIG_TEST(test_a_slow_read_without_a_buffer_is_dropped)
{
	slow_read(true);
}

/* --------------------------------------------------------------------- connecting */

/* What is wrong with the peer, or with what it has told. */
enum wrong { SILENT, OTHER_CONNECTION, OTHER_PROBE, NUMBER, PSN, MTU, READS, LINK };

TEST(test_peers_that_are_refused)
{
	static const struct {
		enum wrong wrong;
		int code;
		const char *words;
	} cases[] = {
		{SILENT, -ETIMEDOUT, "4791"},         {OTHER_CONNECTION, -ETIMEDOUT, "4791"},
		{OTHER_PROBE, -EACCES, "refuses us"}, {NUMBER, -EINVAL, "cannot be"},
		{PSN, -EINVAL, "cannot be"},          {MTU, -EINVAL, "cannot be"},
		{READS, -EINVAL, "cannot be"},        {LINK, -EINVAL, "InfiniBand"},
	};

	for (uint32_t i = 0; i < ISWI_ARRAY_LEN(cases); i++) {
		const enum wrong wrong = cases[i].wrong;
		struct isw_error error = {0};

		rig_make((struct rig){.connect_ms_max = wrong == SILENT ? 100 : 0});
		rig_donor();
		STUB_SET(frozen, wrong == SILENT);
		rig.peer.psn ^= wrong == OTHER_CONNECTION;
		rig.probe_key.rkey += wrong == OTHER_PROBE;
		rig.peer.number = wrong == NUMBER ? 1u << 24 : rig.peer.number;
		rig.peer.psn = wrong == PSN ? 1u << 24 : rig.peer.psn;
		rig.peer.mtu_bytes = wrong == MTU ? 0 : rig.peer.mtu_bytes;
		rig.peer.reads_max = wrong == READS ? 0 : rig.peer.reads_max;
		rig.peer.link = wrong == LINK ? ISW_RDMA_LINK_INFINIBAND : rig.peer.link;
		CHECK_EQ(rig_connect(&error), cases[i].code);
		CHECK_EQ(error.code, cases[i].code);
		check_says(error.text, cases[i].words);
		rig.client.queue->ops->destroy(rig.client.queue);
		CHECK_EQ(rig.client.downs, 0);
		rig_free();
		STUB_SET(frozen, false);
	}
}

/* With the fewest READs and bytes a packet that either end can do. */
TEST_CASES(test_the_smaller_mtu_holds, 2, ours_is_smaller)
{
	struct isw_rdma_end larger = {.mtu_bytes = 4096, .reads_max = 16};
	struct isw_rdma_end smaller = {.mtu_bytes = 1024, .reads_max = 4};
	struct iswi_verbs_choice ours = {.end = ours_is_smaller ? smaller : larger};
	struct iswi_verbs_path path;

	CHECK_EQ(iswi_verbs_meet(&ours, 5, ours_is_smaller ? &larger : &smaller, &path, NULL), 0);
	CHECK_EQ(path.mtu_bytes, 1024);
	CHECK_EQ(path.reads_max, 4);
}

TEST(test_an_end_is_one_host)
{
	static const uint8_t many[][16] = {
		{0xff},
		{0xff, 0x02, [15] = 1},
		{[10] = 0xff, [11] = 0xff, [12] = 224, [15] = 1},
		{[10] = 0xff, [11] = 0xff, [12] = 255, [13] = 255, [14] = 255, [15] = 255},
	};
	struct iswi_verbs_choice ours = {.end = {.mtu_bytes = 4096, .reads_max = 16}};
	struct isw_rdma_end peer = {.mtu_bytes = 1024, .reads_max = 4};
	struct isw_error error = {0};
	struct iswi_verbs_path path;

	for (unsigned i = 0; i < ISWI_ARRAY_LEN(many); i++) {
		memcpy(peer.gid, many[i], sizeof(peer.gid));
		CHECK_EQ(iswi_verbs_meet(&ours, 5, &peer, &path, &error), -EINVAL);
		CHECK(strstr(error.text, "cannot be"));
	}
	memcpy(peer.gid, (uint8_t[16]){[10] = 0xff, [11] = 0xff, [12] = 223}, sizeof(peer.gid));
	CHECK_EQ(iswi_verbs_meet(&ours, 5, &peer, &path, NULL), 0);
}

TEST(test_too_little_memory_may_be_locked)
{
	struct iswi_rdma_config config = {
		.slab_bytes = RIG_SLAB_BYTES, .thread_name = "isw-test", .depth = 1};
	struct iswi_rdma_domains domains = {0};
	struct iswi_rdma_domain *domain;
	struct iswi_verbs_choice choice;
	struct iswi_queue *queue;
	struct isw_error error = {0};
	struct isw_rdma_end end;

	CHECK_EQ(iswi_verbs_choose(&stub_verbs, "127.0.0.1", &choice, &error), 0);
	iswi_rdma_domains_init(&domains);
	domains.verbs = &stub_verbs;
	for (int makes = 0; makes < 2; makes++) {
		STUB_SET(mr_makes_left, makes);
		CHECK_EQ(iswi_rdma_domain_join(&domains, choice.device, page, sizeof(page), &domain,
					       &error),
			 makes == 0 ? -ENOMEM : 0);
		check_says(error.text, "ulimit -l");
	}
	CHECK_EQ(iswi_rdma_places_make(1, &config.places), 0);
	config.domain = domain;
	config.choice = &choice;
	error.text[0] = '\0';
	CHECK_EQ(iswi_rdma_make(&config, &queue, &end, &error), -ENOMEM);
	check_says(error.text, "ulimit -l");
	STUB_SET(mr_makes_left, -1);
	config.depth = 0;
	CHECK_EQ(iswi_rdma_make(&config, &queue, &end, &error), -EINVAL);
	iswi_rdma_places_leave(config.places);
	iswi_rdma_domain_leave(domain);
}

int main(void)
{
	return run_on_rig(true);
}
