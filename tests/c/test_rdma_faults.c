/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The RDMA transport when something breaks: the queue goes down first, each transfer ends once, and
 * nobody touches a buffer after that. On the stub.
 */
#include "rdma_fixture.h"

static char page[ISW_PAGE_BYTES], other[ISW_PAGE_BYTES];

static void run_into(struct rig *rig, enum iswi_xfer_kind kind, int error)
{
	struct op ops[4], late;

	for (uint32_t i = 0; i < 4; i++) {
		op_start(&ops[i], &rig->client, kind, rig_offset(0, i), page, ISW_PAGE_BYTES);
	}
	CHECK_EQ(client_wait_down(&rig->client), error);
	client_wait_ended(&rig->client, 4);
	for (uint32_t i = 0; i < 4; i++)
		CHECK_EQ(ops[i].error, error);
	CHECK_EQ(op_do(&late, &rig->client, kind, 0, page, ISW_PAGE_BYTES), -ESHUTDOWN);
}

/* A deadline ends our wait; nothing that the donor does later is seen. */
static void test_silence_ends_with_the_deadline(enum iswi_xfer_kind kind)
{
	struct rig rig = {.request_ms_max = 200};

	rig_start(&rig);
	STUB_SET(frozen, true);
	memset(page, 0x11, sizeof(page));
	memset(rig.memory, 0x22, RIG_SLAB_BYTES);
	run_into(&rig, kind, -ETIMEDOUT);
	STUB_SET(frozen, false);
	usleep(20000);
	CHECK(all_bytes(page, 0x11, sizeof(page)));
	CHECK(all_bytes(rig.memory, 0x22, 4 * ISW_PAGE_BYTES));
	rig_stop(&rig);
}

static void test_a_dead_key_ends_the_queue(enum iswi_xfer_kind kind)
{
	struct rig rig = {0};

	rig_start(&rig);
	rig_fence(&rig);
	run_into(&rig, kind, -EACCES);
	CHECK_EQ(rig.memory[0], 0);
	rig_stop(&rig);
}

static void test_the_peers_end_ends_the_queue(void)
{
	struct rig rig = {0};

	rig_start(&rig);
	CHECK_EQ(rig.verbs->qp_free(rig.qp), 0);
	rig.qp = NULL;
	run_into(&rig, ISWI_XFER_READ, -ETIMEDOUT);
	rig_stop(&rig);
}

static void test_a_post_that_fails_ends_the_queue(void)
{
	struct op ops[3];
	struct rig rig = {0};

	rig_start(&rig);
	STUB_SET(frozen, true);
	STUB_SET(post_error, -ENOMEM);
	for (uint32_t i = 0; i < 3; i++)
		op_init(&ops[i], &rig.client, ISWI_XFER_WRITE, rig_offset(0, i), page,
			ISW_PAGE_BYTES);
	ops_submit(ops, 3);
	CHECK_EQ(client_wait_down(&rig.client), -ENOMEM);
	client_wait_ended(&rig.client, 3);
	STUB_SET(frozen, false);
	rig_stop(&rig);
}

/* One of many fails: those before it are done, it and those behind it are not. */
static void test_an_error_in_the_middle(void)
{
	struct op ops[8];
	struct rig rig = {0};

	rig_start(&rig);
	for (uint32_t i = 0; i < 8; i++) {
		op_init(&ops[i], &rig.client, ISWI_XFER_READ, rig_offset(0, i), page,
			ISW_PAGE_BYTES);
		if (i < 4)
			CHECK_EQ(op_run(&ops[i]), 0);
	}
	STUB_SET(frozen, true);
	for (uint32_t i = 4; i < 8; i++)
		op_submit(&ops[i]);
	STUB_SET(transfer_error, -EIO);
	STUB_SET(frozen, false);
	CHECK_EQ(client_wait_down(&rig.client), -EIO);
	client_wait_ended(&rig.client, 8);
	for (uint32_t i = 4; i < 8; i++)
		CHECK_EQ(ops[i].error, -EIO);
	rig_stop(&rig);
}

static void test_a_queue_pair_that_stays_does_not_hang_us(void)
{
	struct rig rig = {.request_ms_max = 200};

	rig_start(&rig);
	STUB_SET(frozen, true);
	STUB_SET(qp_free_error, -EBUSY);
	run_into(&rig, ISWI_XFER_WRITE, -ETIMEDOUT);
	STUB_SET(qp_free_error, 0);
	STUB_SET(frozen, false);
	rig_stop(&rig); /* it is freed with the queue */
}

static void test_shutdown_and_destroy_with_much_in_flight(void)
{
	struct op ops[40];
	struct rig rig = {0};

	rig_start(&rig);
	STUB_SET(frozen, true);
	for (uint32_t i = 0; i < 40; i++) {
		op_start(&ops[i], &rig.client, i % 2 ? ISWI_XFER_READ : ISWI_XFER_WRITE,
			 rig_offset(0, i), page, ISW_PAGE_BYTES);
	}
	client_shutdown(&rig.client);
	client_shutdown(&rig.client);
	CHECK_EQ(client_wait_down(&rig.client), -ESHUTDOWN);
	rig_stop(&rig);
	for (uint32_t i = 0; i < 40; i++)
		CHECK_EQ(ops[i].error, -ESHUTDOWN);
	STUB_SET(frozen, false);
}

/* Its descriptor is readable for ever then: nobody must spin on that. */
static void test_a_device_that_was_removed_ends_an_idle_queue(void)
{
	struct rig rig = {.request_ms_max = 100};
	int ends[2];

	rig_start(&rig);
	CHECK_EQ(pipe(ends), 0);
	close(ends[1]);
	pthread_mutex_lock(&stub.lock);
	for (uint32_t i = 0; i < STUB_QPS; i++)
		if (stub.qps[i] != NULL && stub.qps[i]->cq->fd >= 0)
			CHECK(dup2(ends[0], stub.qps[i]->cq->fd) >= 0);
	pthread_mutex_unlock(&stub.lock);
	close(ends[0]);
	CHECK_EQ(client_wait_down(&rig.client), -EIO);
	rig_stop(&rig);
}

/* -------------------------------------------------------------------- slow READs */

static struct {
	struct iswi_xfer *xfer;
	atomic_uint calls;
} slowed;

static void exchange(struct iswi_xfer *xfer, uint32_t received)
{
	CHECK_EQ(received, 0);
	slowed.xfer = xfer;
	xfer->buf = other;
	atomic_fetch_add(&slowed.calls, 1);
}

static void test_a_slow_read_may_get_another_buffer(void)
{
	struct rig rig = {0};
	struct op op;

	rig_start(&rig);
	memset(rig.memory, 0x55, ISW_PAGE_BYTES);
	memset(page, 1, sizeof(page));
	memset(other, 2, sizeof(other));
	STUB_SET(frozen, true);
	op_init(&op, &rig.client, ISWI_XFER_READ, 0, page, ISW_PAGE_BYTES);
	op.xfer.slow = exchange;
	op.xfer.slow_us = 1000;
	op_submit(&op);
	for (uint32_t i = 0; atomic_load(&slowed.calls) == 0; i++) {
		CHECK(i < WAIT_S * 1000);
		usleep(1000);
	}
	STUB_SET(frozen, false);
	client_wait_ended(&rig.client, 1);
	CHECK_EQ(op.error, 0);
	CHECK_EQ(atomic_load(&slowed.calls), 1);
	CHECK(slowed.xfer == &op.xfer);
	CHECK_EQ(other[0], 0x55);
	CHECK_EQ(page[0], 1);
	rig_stop(&rig);
}

/* --------------------------------------------------------------------- connecting */

/* What is wrong with the peer, or with what it has told. */
enum wrong { SILENT, OTHER_CONNECTION, OTHER_PROBE, NUMBER, PSN, MTU, READS, LINK };

static void test_peers_that_are_refused(void)
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
		struct rig rig = {.connect_ms_max = wrong == SILENT ? 100 : 0};
		struct isw_error error = {0};

		rig_make(&rig);
		rig_donor(&rig);
		STUB_SET(frozen, wrong == SILENT);
		rig.peer.psn ^= wrong == OTHER_CONNECTION;
		rig.probe_key.rkey += wrong == OTHER_PROBE;
		rig.peer.number = wrong == NUMBER ? 1u << 24 : rig.peer.number;
		rig.peer.psn = wrong == PSN ? 1u << 24 : rig.peer.psn;
		rig.peer.mtu_bytes = wrong == MTU ? 0 : rig.peer.mtu_bytes;
		rig.peer.reads_max = wrong == READS ? 0 : rig.peer.reads_max;
		rig.peer.link = wrong == LINK ? ISW_RDMA_LINK_INFINIBAND : rig.peer.link;
		CHECK_EQ(rig_connect(&rig, &error), cases[i].code);
		CHECK_EQ(error.code, cases[i].code);
		if (strstr(error.text, cases[i].words) == NULL) {
			fprintf(stderr, "%s\n", error.text);
			CHECK(0);
		}
		rig.client.queue->ops->destroy(rig.client.queue);
		CHECK_EQ(rig.client.downs, 0);
		rig_free(&rig);
		STUB_SET(frozen, false);
	}
}

/* With the fewest READs and bytes a packet that either end can do. */
static void test_the_smaller_mtu_holds(void)
{
	struct iswi_verbs_choice ours = {.end = {.mtu_bytes = 4096, .reads_max = 16}};
	struct isw_rdma_end peer = {.mtu_bytes = 1024, .reads_max = 4};
	struct iswi_verbs_path path;

	CHECK_EQ(iswi_verbs_meet(&ours, 5, &peer, &path, NULL), 0);
	CHECK_EQ(path.mtu_bytes, 1024);
	CHECK_EQ(path.reads_max, 4);
	ours.end.mtu_bytes = 512;
	ours.end.reads_max = 2;
	CHECK_EQ(iswi_verbs_meet(&ours, 5, &peer, &path, NULL), 0);
	CHECK_EQ(path.mtu_bytes, 512);
	CHECK_EQ(path.reads_max, 2);
}

static void test_an_end_is_one_host(void)
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

static void test_too_little_memory_may_be_locked(void)
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
	STUB_SET(mr_makes_left, 0);
	CHECK_EQ(
		iswi_rdma_domain_join(&domains, choice.device, page, sizeof(page), &domain, &error),
		-ENOMEM);
	CHECK(strstr(error.text, "ulimit -l"));
	STUB_SET(mr_makes_left, 1);
	CHECK_EQ(
		iswi_rdma_domain_join(&domains, choice.device, page, sizeof(page), &domain, &error),
		0);
	CHECK_EQ(iswi_rdma_places_make(1, &config.places), 0);
	config.domain = domain;
	config.choice = &choice;
	CHECK_EQ(iswi_rdma_make(&config, &queue, &end, &error), -ENOMEM);
	CHECK(strstr(error.text, "ulimit -l"));
	STUB_SET(mr_makes_left, -1);
	config.depth = 0;
	CHECK_EQ(iswi_rdma_make(&config, &queue, &end, &error), -EINVAL);
	iswi_rdma_places_leave(config.places);
	iswi_rdma_domain_leave(domain);
}

int main(void)
{
	if (!rig_on_stub())
		SKIP("the faults are the stub's");
	tests_begin();
	test_silence_ends_with_the_deadline(ISWI_XFER_READ);
	test_silence_ends_with_the_deadline(ISWI_XFER_WRITE);
	test_a_dead_key_ends_the_queue(ISWI_XFER_READ);
	test_a_dead_key_ends_the_queue(ISWI_XFER_WRITE);
	test_the_peers_end_ends_the_queue();
	test_a_post_that_fails_ends_the_queue();
	test_an_error_in_the_middle();
	test_a_queue_pair_that_stays_does_not_hang_us();
	test_shutdown_and_destroy_with_much_in_flight();
	test_a_device_that_was_removed_ends_an_idle_queue();
	test_a_slow_read_may_get_another_buffer();
	test_peers_that_are_refused();
	test_the_smaller_mtu_holds();
	test_an_end_is_one_host();
	test_too_little_memory_may_be_locked();
	tests_end();
	return 0;
}
