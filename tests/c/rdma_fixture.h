/* SPDX-License-Identifier: Apache-2.0 */
/*
 * For the tests of the RDMA transport: a queue of the consumer's and a donor made of bare verbs,
 * on the stub or, with ISW_TEST_RDMA_HOST, on this host's own devices. The operations are those of
 * tcp_fixture.h, which check the promises of transport.h for every transfer.
 */
#ifndef ISW_TEST_RDMA_FIXTURE_H
#define ISW_TEST_RDMA_FIXTURE_H

#define OWN_MAIN
#include "tcp_fixture.h"
#include "tests_between.h"
#include "transport/rdma.h"
#include "verbs_stub.h"

#define RIG_SLAB_PAGES   512u
#define RIG_SLAB_BYTES   (RIG_SLAB_PAGES * ISW_PAGE_BYTES)
#define RIG_SLOTS        4u /* with keys; one more is without */
#define RIG_STAGED_PAGES 16u

static struct rig {
	uint32_t depth;
	uint32_t request_ms_max, connect_ms_max;

	struct iswi_rdma_domains domains;
	struct iswi_rdma_domain *domain;
	struct iswi_rdma_places *places;
	struct client client;
	struct isw_rdma_end end, peer;
	char *staging;
	/* The donor's. */
	struct iswi_verbs_choice choice;
	struct iswi_vdev *dev;
	struct iswi_vpd *pd;
	struct iswi_vcq *cq;
	struct iswi_vqp *qp;
	char *memory;
	char *probe;
	struct iswi_vmr *mr, *probe_mr;
	struct iswi_verbs_key key;
	struct isw_rdma_key probe_key;
} rig;

static UNUSED bool rig_on_stub(void)
{
	return getenv("ISW_TEST_RDMA_HOST") == NULL;
}

static UNUSED const struct iswi_verbs *rig_verbs(void)
{
	return rig_on_stub() ? &stub_verbs : &iswi_verbs_system;
}

static UNUSED const char *rig_host(void)
{
	return rig_on_stub() ? "127.0.0.1" : getenv("ISW_TEST_RDMA_HOST");
}

static UNUSED void *rig_pages(uint64_t bytes)
{
	void *memory = aligned_alloc(ISW_PAGE_BYTES, bytes);

	CHECK(memory);
	memset(memory, 0, bytes);
	return memory;
}

/* Both ends, not connected; what is not wanted to be otherwise is as usual. */
static UNUSED void rig_make(struct rig wanted)
{
	struct iswi_rdma_config config = {.slab_bytes = RIG_SLAB_BYTES, .thread_name = "isw-test"};
	struct iswi_verbs_choice ours;
	struct isw_error error = {0};

	rig = wanted;
	rig.depth = rig.depth ? rig.depth : 16;
	rig.request_ms_max = rig.request_ms_max ? rig.request_ms_max : WAIT_S * 1000;
	rig.connect_ms_max = rig.connect_ms_max ? rig.connect_ms_max : WAIT_S * 1000;
	rig.staging = rig_pages(RIG_STAGED_PAGES * ISW_PAGE_BYTES);
	rig.memory = rig_pages(RIG_SLOTS * RIG_SLAB_BYTES);
	rig.probe = rig_pages(ISW_PAGE_BYTES);
	client_init(&rig.client);
	CHECK_EQ(iswi_verbs_choose(rig_verbs(), rig_host(), &ours, &error), 0);
	iswi_rdma_domains_init(&rig.domains);
	rig.domains.verbs = rig_verbs();
	CHECK_EQ(iswi_rdma_domain_join(&rig.domains, ours.device, rig.staging,
				       RIG_STAGED_PAGES * ISW_PAGE_BYTES, &rig.domain, &error),
		 0);
	CHECK_EQ(iswi_rdma_places_make(RIG_SLOTS + 1, &rig.places), 0);
	config.domain = rig.domain;
	config.places = rig.places;
	config.choice = &ours;
	config.depth = rig.depth;
	config.request_bytes_max = 1u << 20;
	CHECK_EQ(iswi_rdma_make(&config, &rig.client.queue, &rig.end, &error), 0);

	CHECK_EQ(iswi_verbs_choose_for(rig_verbs(), &rig.end, &rig.choice, &error), 0);
	CHECK_EQ(rig_verbs()->open(rig.choice.device, &rig.dev, &error), 0);
	CHECK_EQ(rig_verbs()->pd_make(rig.dev, &rig.pd), 0);
	CHECK_EQ(rig_verbs()->cq_make(rig.dev, 4, &rig.cq, NULL), 0);
}

static UNUSED void rig_donor(void)
{
	const struct iswi_verbs_qp_config qp = {
		.port = rig.choice.port,
		.gid_index = rig.choice.gid_index,
		.sends_max = 1,
		.peer = ISWI_VERBS_PEER_READS | ISWI_VERBS_PEER_WRITES,
	};
	struct iswi_verbs_path path;
	struct iswi_verbs_key key;
	struct isw_error error = {0};

	CHECK_EQ(rig_verbs()->mr_make(rig.pd, rig.memory, RIG_SLOTS * RIG_SLAB_BYTES,
				      ISWI_VERBS_PEER_READS | ISWI_VERBS_PEER_WRITES, &rig.mr,
				      &rig.key),
		 0);
	CHECK_EQ(rig_verbs()->mr_make(rig.pd, rig.probe, ISW_PAGE_BYTES, ISWI_VERBS_PEER_READS,
				      &rig.probe_mr, &key),
		 0);
	rig.probe_key = (struct isw_rdma_key){(uintptr_t)rig.probe, key.remote};
	rig.peer = rig.choice.end;
	CHECK_EQ(iswi_verbs_psn(&rig.peer.psn), 0);
	CHECK_EQ(iswi_verbs_meet(&rig.choice, rig.peer.psn, &rig.end, &path, &error), 0);
	CHECK_EQ(rig_verbs()->qp_make(rig.pd, rig.cq, &qp, &rig.qp, &rig.peer.number), 0);
	CHECK_EQ(rig_verbs()->qp_connect(rig.qp, &path), 0);
}

static UNUSED int rig_connect(struct isw_error *error)
{
	const struct iswi_queue_events events = {.down = client_down, .ctx = &rig.client};

	return iswi_rdma_connect(rig.client.queue, &rig.peer, &rig.probe_key, rig.connect_ms_max,
				 rig.request_ms_max, &events, error);
}

/* Slot i lies at i slabs of the donor's memory. */
static UNUSED void rig_keys(void)
{
	for (uint32_t i = 0; i < RIG_SLOTS; i++) {
		const struct isw_rdma_key key = {
			(uintptr_t)rig.memory + i * (uint64_t)RIG_SLAB_BYTES, rig.key.remote};

		CHECK_EQ(iswi_rdma_places_set(rig.places, i, &key), 0);
	}
}

static UNUSED void rig_start(struct rig wanted)
{
	struct isw_error error = {0};

	rig_make(wanted);
	rig_donor();
	if (rig_connect(&error) != 0) {
		fprintf(stderr, "connect: %s\n", error.text);
		exit(1);
	}
	rig_keys();
}

/* The donor's key is dead from here on. */
static UNUSED void rig_fence(void)
{
	CHECK_EQ(rig_verbs()->mr_free(rig.mr), 0);
	rig.mr = NULL;
}

/* The queue is destroyed, or never was. */
static UNUSED void rig_free(void)
{
	if (rig.qp)
		CHECK_EQ(rig_verbs()->qp_free(rig.qp), 0);
	if (rig.mr)
		rig_fence();
	if (rig.probe_mr)
		CHECK_EQ(rig_verbs()->mr_free(rig.probe_mr), 0);
	rig_verbs()->cq_free(rig.cq);
	rig_verbs()->pd_free(rig.pd);
	rig_verbs()->close(rig.dev);
	iswi_rdma_domain_leave(rig.domain);
	iswi_rdma_places_leave(rig.places);
	free(rig.staging);
	free(rig.memory);
	free(rig.probe);
}

static UNUSED void rig_stop(void)
{
	client_destroy(&rig.client);
	rig_free();
}

/* A test on a rig, with some of its members as wanted. */
#define RIG_TEST(name, ...) BETWEEN_TEST(name, rig_start((struct rig){__VA_ARGS__}), rig_stop())

static UNUSED uint64_t rig_offset(uint32_t slot, uint32_t page)
{
	return slot * (uint64_t)RIG_SLAB_BYTES + page * ISW_PAGE_BYTES;
}

static UNUSED void rig_op(struct op *op, enum iswi_xfer_kind kind, uint32_t slot, uint32_t page,
			  void *buf)
{
	op_init(op, &rig.client, kind, rig_offset(slot, page), buf, ISW_PAGE_BYTES);
}

static UNUSED int rig_do(enum iswi_xfer_kind kind, uint32_t slot, uint32_t page, void *buf)
{
	struct op op;

	rig_op(&op, kind, slot, page, buf);
	return op_run(&op);
}

/* All of this program; `only_stub`: they break what real devices do not let one break. */
static UNUSED int run_on_rig(bool only_stub)
{
	if (only_stub && !rig_on_stub())
		SKIP("the faults are the stub's");
	if (rig_on_stub())
		stub_start();
	run_tests();
	if (rig_on_stub())
		stub_stop();
	return 0;
}

#endif
