// SPDX-License-Identifier: Apache-2.0
/*
 * Requests to an export whose bytes lie in memory: right ones, wrong ones, and broken streams. All
 * of it twice: workers serve every connection, or some keep threads of their own.
 */
#define OWN_MAIN
#include "nbd_memory_fixture.h"

static uint32_t lone_threads_max;

static void set_up(uint32_t send_ms)
{
	set_up_with(&(struct iswi_nbd_server_config){
		.backend = &secret_backend,
		.connections_max = PLACES,
		.connections_per_host_max = PLACES - 1,
		.handshake_ms_max = WAIT_S * 1000,
		.send_ms_max = send_ms,
		.lone_threads_max = lone_threads_max,
	});
}

#define SERVED_TEST(name) BETWEEN_TEST(name, set_up(WAIT_S * 1000), tear_down())

/*
 * The connection's thread has ended too: ThreadSanitizer counts what sendmsg reads only after it
 * has returned, which may be when the client has its answer and another connection writes there.
 */
static void leave(int fd)
{
	close(fd);
	WAIT_FOR(server_stats().connections == 0);
}

SERVED_TEST(test_bytes_go_round)
{
	static char out[BLOCK_MAX], in[BLOCK_MAX];
	static const uint32_t sizes[] = {512, 4096, 65536, 65536 + 512, BLOCK_MAX};
	int fd = open_export(port, "");
	uint64_t moved = 0;

	for (unsigned i = 0; i < ISWI_ARRAY_LEN(sizes); i++) {
		memset(out, (int)(i + 1), sizes[i]);
		out[sizes[i] - 1] = 99;
		CHECK_EQ(do_write(fd, 512 * i, out, sizes[i]), 0);
		CHECK_EQ(do_read(fd, 512 * i, in, sizes[i]), 0);
		CHECK(memcmp(in, out, sizes[i]) == 0);
		moved += sizes[i];
	}
	/* Counted after the answer has left. */
	WAIT_FOR(iswi_counted(&counters.read_bytes) == moved);
	CHECK_EQ(iswi_counted(&counters.read_requests), ISWI_ARRAY_LEN(sizes));
	CHECK_EQ(iswi_counted(&counters.write_bytes), moved);
	CHECK_EQ(iswi_counted(&counters.write_requests), ISWI_ARRAY_LEN(sizes));
	CHECK_EQ(server_stats().write_bytes, moved);
	leave(fd);
}

/*
 * A turn of 1 MiB ends in the middle of a page: that is not cut, and its client waits once.
 * Messages show what was one send: a receive takes no more than one, and the rest of a longer one
 * is lost.
 */
TEST_CASES(test_the_end_of_a_turn_cuts_no_page, 2, writes)
{
	static char page[4096], answer[NBD_SIMPLE_REPLY_BYTES + sizeof(page) + 1];
	const uint16_t command = writes ? NBD_CMD_WRITE : NBD_CMD_READ;
	const ssize_t answer_bytes = NBD_SIMPLE_REPLY_BYTES + (writes ? 0 : sizeof(page));
	int ends[2];

	set_up(WAIT_S * 1000);
	make_ends(SOCK_SEQPACKET, ends);
	CHECK_EQ(iswi_nbd_server_connected(server, ends[1], NULL), 0);
	for (unsigned i = 0; i < 600; i++) {
		CHECK(say_request(ends[0], command, 0, i, 0, sizeof(page)));
		if (writes)
			CHECK(say(ends[0], page, sizeof(page)));
		CHECK_EQ(recv(ends[0], answer, sizeof(answer), 0), answer_bytes);
	}
	leave(ends[0]);
	tear_down();
}

SERVED_TEST(test_zeroes_and_flush)
{
	static const struct {
		uint16_t command, flags;
	} cases[] = {{NBD_CMD_TRIM, 0},
		     {NBD_CMD_TRIM, NBD_CMD_FLAG_FUA},
		     {NBD_CMD_WRITE_ZEROES, NBD_CMD_FLAG_NO_HOLE},
		     {NBD_CMD_WRITE_ZEROES, NBD_CMD_FLAG_FUA}};
	int fd = open_export(port, "");

	for (unsigned i = 0; i < ISWI_ARRAY_LEN(cases); i++) {
		fill_bytes(fd, 0, 7, 3 * 4096);
		CHECK_EQ(do_command(fd, cases[i].command, cases[i].flags, 4096, 4096), 0);
		check_bytes(fd, 4096, 0, 4096);
		check_bytes(fd, 0, 7, 4096);
		check_bytes(fd, 8192, 7, 4096);
	}
	CHECK_EQ(do_command(fd, NBD_CMD_FLUSH, 0, 0, 0), 0);
	/* Longer than a READ or WRITE may be. */
	CHECK_EQ(do_command(fd, NBD_CMD_TRIM, 0, 0, BAD_FROM), 0);
	leave(fd);
}

/* Well-formed and wrong: an error, and the connection goes on. */
SERVED_TEST(test_request_errors)
{
	static const struct {
		uint16_t command, flags;
		uint64_t offset;
		uint32_t length, error;
	} cases[] = {
		{NBD_CMD_READ, 0, EXPORT_BYTES, 4096, NBD_EINVAL},
		{NBD_CMD_READ, 0, EXPORT_BYTES - 512, 1024, NBD_EINVAL},
		{NBD_CMD_READ, 0, UINT64_MAX - 511, 512, NBD_EINVAL},
		{NBD_CMD_READ, 0, UINT64_MAX - 511, 1024, NBD_EINVAL},
		{NBD_CMD_READ, 0, 0, 0, NBD_EINVAL},
		{NBD_CMD_READ, 0, 0, BLOCK_MAX + 512, NBD_EINVAL},
		{NBD_CMD_READ, 0, 0, UINT32_MAX - 511, NBD_EINVAL},
		{NBD_CMD_READ, 0, 256, 512, NBD_EINVAL},
		{NBD_CMD_READ, 0, 512, 100, NBD_EINVAL},
		{NBD_CMD_READ, NBD_CMD_FLAG_DF, 0, 512, NBD_EINVAL},
		{NBD_CMD_READ, NBD_CMD_FLAG_NO_HOLE, 0, 512, NBD_EINVAL},
		{NBD_CMD_READ, 0, BAD_FROM, 512, NBD_EIO},
		{NBD_CMD_TRIM, 0, EXPORT_BYTES, 512, NBD_EINVAL},
		{NBD_CMD_TRIM, 0, 0, 0, NBD_EINVAL},
		{NBD_CMD_TRIM, 0, BAD_FROM, 512, NBD_EIO},
		{NBD_CMD_WRITE_ZEROES, 0, EXPORT_BYTES - 512, 1024, NBD_ENOSPC},
		{NBD_CMD_WRITE_ZEROES, NBD_CMD_FLAG_FAST_ZERO, 0, 512, NBD_EINVAL},
		{NBD_CMD_WRITE_ZEROES, 0, BAD_FROM, 512, NBD_EIO},
		{NBD_CMD_FLUSH, NBD_CMD_FLAG_NO_HOLE, 0, 0, NBD_EINVAL},
		{NBD_CMD_CACHE, 0, 0, 512, NBD_EINVAL},
		{NBD_CMD_BLOCK_STATUS, 0, 0, 512, NBD_EINVAL},
		{999, 0, 0, 512, NBD_EINVAL},
	};
	char page[512];
	int fd = open_export(port, "");

	for (unsigned i = 0; i < ISWI_ARRAY_LEN(cases); i++) {
		CHECK_EQ(do_command(fd, cases[i].command, cases[i].flags, cases[i].offset,
				    cases[i].length),
			 cases[i].error);
		CHECK_EQ(do_read(fd, 0, page, sizeof(page)), 0);
	}
	CHECK_EQ(server_stats().request_errors, ISWI_ARRAY_LEN(cases));
	leave(fd);
}

/* A refused WRITE's payload is not taken for the next request. */
SERVED_TEST(test_refused_writes)
{
	static char data[BLOCK_MAX + 512];
	static const struct {
		uint64_t offset;
		uint32_t length, error;
	} cases[] = {
		{EXPORT_BYTES, 4096, NBD_ENOSPC},
		{EXPORT_BYTES - 512, 1024, NBD_ENOSPC},
		{100, 512, NBD_EINVAL},
		{0, 100, NBD_EINVAL},
		{0, 0, NBD_EINVAL},
		{0, BLOCK_MAX + 512, NBD_EINVAL},
		{BAD_FROM, 65536, NBD_EIO},
		{BAD_FROM, 512, NBD_EIO},
		{UINT64_MAX - 511, 512, NBD_ENOSPC},
	};
	int fd = open_export(port, "");

	fill_bytes(fd, 0, 5, 4096);
	memset(data, 6, sizeof(data));
	for (unsigned i = 0; i < ISWI_ARRAY_LEN(cases); i++) {
		CHECK_EQ(do_write(fd, cases[i].offset, data, cases[i].length), cases[i].error);
		check_bytes(fd, 0, 5, 512);
	}
	leave(fd);
}

SERVED_TEST(test_broken_streams)
{
	static const char zeros[NBD_REQUEST_BYTES];
	int fd = open_export(port, "");

	CHECK(say(fd, zeros, sizeof(zeros)));
	await_close(fd);
	WAIT_FOR(server_stats().protocol_errors == 1);
	fd = open_export(port, "");
	CHECK(say_request(fd, NBD_CMD_WRITE, 0, 1, 0, ISWI_NBD_PAYLOAD_BYTES_MAX + 1));
	await_close(fd);
	WAIT_FOR(server_stats().protocol_errors == 2);
	/* Gone in the middle of a header, or of a payload: nobody's fault, nothing kept. */
	fd = open_export(port, "");
	CHECK(say(fd, zeros, 5));
	close(fd);
	fd = open_export(port, "");
	CHECK(say_request(fd, NBD_CMD_WRITE, 0, 1, 0, 4096));
	CHECK(say(fd, zeros, sizeof(zeros)));
	close(fd);
	WAIT_FOR(server_stats().connections == 0);
	CHECK_EQ(server_stats().protocol_errors, 2);
	CHECK_EQ(atomic_load(&holds), 0);
}

/* More requests in one send than one batch of answers; DISC at the end loses none of them. */
SERVED_TEST(test_pipelined_then_disc)
{
	enum { COUNT = 300 };
	static unsigned char wire[COUNT * NBD_REQUEST_BYTES + NBD_REQUEST_BYTES];
	char block[512];
	struct nbd_request request = {.command = NBD_CMD_READ, .length = sizeof(block)};
	int fd = open_export(port, "");

	for (unsigned i = 0; i < COUNT; i++) {
		fill_bytes(fd, i * sizeof(block), (int)(i & 0xff), sizeof(block));
		request.cookie = i;
		request.offset = i * sizeof(block);
		nbd_put_request(wire + i * NBD_REQUEST_BYTES, &request);
	}
	request = (struct nbd_request){.command = NBD_CMD_DISC};
	nbd_put_request(wire + COUNT * NBD_REQUEST_BYTES, &request);
	CHECK(say(fd, wire, sizeof(wire)));
	for (unsigned i = 0; i < COUNT; i++) {
		CHECK_EQ(hear_reply(fd, i, block, sizeof(block)), 0);
		CHECK(all_bytes(block, (unsigned char)(i & 0xff), sizeof(block)));
	}
	hear_close(fd);
	leave(fd);
}

/* The answer to a request must not wait for the rest of the next one. */
SERVED_TEST(test_answers_before_it_waits)
{
	char block[512];
	int fd = open_export(port, "");

	fill_bytes(fd, 0, 3, sizeof(block));
	CHECK(say_request(fd, NBD_CMD_READ, 0, 1, 0, sizeof(block)));
	CHECK(say_request(fd, NBD_CMD_WRITE, 0, 2, 4096, sizeof(block)));
	CHECK(say(fd, block, 100));
	CHECK_EQ(hear_reply(fd, 1, block, sizeof(block)), 0);
	CHECK(all_bytes(block, 3, sizeof(block)));
	CHECK(say(fd, block + 100, sizeof(block) - 100));
	CHECK_EQ(hear_reply(fd, 2, NULL, 0), 0);
	CHECK(say_request(fd, NBD_CMD_READ, 0, 3, 0, sizeof(block)));
	CHECK(say(fd, "\x25\x60", 2)); /* the beginning of a header */
	CHECK_EQ(hear_reply(fd, 3, block, sizeof(block)), 0);
	leave(fd);
}

/* One byte at a time: every border between receives is one a request may lie on. */
SERVED_TEST(test_drip)
{
	unsigned char wire[NBD_REQUEST_BYTES + 512];
	struct nbd_request request = {
		.command = NBD_CMD_WRITE, .cookie = 9, .offset = 512, .length = 512};
	int fd = open_export(port, "");

	nbd_put_request(wire, &request);
	memset(wire + NBD_REQUEST_BYTES, 0x5a, 512);
	for (unsigned i = 0; i < sizeof(wire); i++)
		CHECK(say(fd, wire + i, 1));
	CHECK_EQ(hear_reply(fd, 9, NULL, 0), 0);
	check_bytes(fd, 512, 0x5a, 512);
	leave(fd);
}

/* Asks and never reads: its holds end with it, and others are served meanwhile. */
BETWEEN_TEST(test_client_that_never_reads, set_up(300), tear_down())
{
	char block[512];
	int deaf = dial_buffered(port, 4096), fd;

	CHECK_EQ(try_open(deaf, ""), 0);
	for (unsigned i = 0; i < 64; i++)
		if (!say_request(deaf, NBD_CMD_READ, 0, i, 0, BLOCK_MAX))
			break;
	WAIT_FOR(atomic_load(&holds) > 0);
	fd = open_export(port, "");
	CHECK_EQ(do_read(fd, 0, block, sizeof(block)), 0);
	WAIT_FOR(atomic_load(&opens) == 1);
	CHECK_EQ(atomic_load(&holds), 0);
	CHECK_EQ(do_read(fd, 0, block, sizeof(block)), 0);
	close(deaf);
	close(fd);
}

/* Each in a part of its own: what clients do to the same bytes at once is their affair. */
static void *hammer(void *opaque)
{
	const uint64_t base = (uintptr_t)opaque * 65536;
	int fd = open_export(port, "");

	for (unsigned i = 0; i < 500; i++) {
		const uint64_t offset = base + 4096 * (i % 16);

		fill_bytes(fd, offset, (int)(i & 0x7f) + 1, 4096);
		check_bytes(fd, offset, (int)(i & 0x7f) + 1, 4096);
		CHECK_EQ(do_command(fd, NBD_CMD_TRIM, 0, offset, 512), 0);
	}
	close(fd);
	return NULL;
}

SERVED_TEST(test_connections_at_once)
{
	at_once(4, hammer);
	WAIT_FOR(server_stats().connections == 0);
}

/* Not when its place is used again: that may be never. */
SERVED_TEST(test_ended_connections_are_freed)
{
	int fds[PLACES - 1];

	for (unsigned round = 0; round < 20; round++) {
		for (unsigned i = 0; i < ISWI_ARRAY_LEN(fds); i++)
			fds[i] = open_export(port, "");
		for (unsigned i = 0; i < ISWI_ARRAY_LEN(fds); i++)
			close(fds[i]);
		WAIT_FOR(server_stats().connections == 0);
		pthread_mutex_lock(&server->lock);
		for (unsigned i = 0; i < PLACES; i++)
			CHECK(server->conns[i] == NULL);
		pthread_mutex_unlock(&server->lock);
	}
}

/* Threads that end at once, and a server that is destroyed meanwhile. */
TEST_CASES(test_connections_that_end_with_their_server, 20, round)
{
	const unsigned ended = round % (PLACES - 1);
	int fds[PLACES - 1];

	set_up(WAIT_S * 1000);
	for (unsigned i = 0; i < ISWI_ARRAY_LEN(fds); i++)
		fds[i] = open_export(port, "");
	for (unsigned i = 0; i < ended; i++)
		close(fds[i]);
	tear_down();
	for (unsigned i = ended; i < ISWI_ARRAY_LEN(fds); i++)
		close(fds[i]);
}

/* Returns the client's end. */
static int add_from(const char *address)
{
	struct sockaddr_in6 in6 = {.sin6_family = AF_INET6};
	struct sockaddr_storage from = {0};
	unsigned char peer[PEER_BYTES];
	int ends[2];

	CHECK_EQ(inet_pton(AF_INET6, address, &in6.sin6_addr), 1);
	memcpy(&from, &in6, sizeof(in6));
	CHECK(iswi_nbd_peer_of(&from, peer));
	make_ends(SOCK_STREAM, ends);
	iswi_nbd_server_add(server, ends[1], peer);
	return ends[0];
}

static int opened_from(const char *address)
{
	int fd = add_from(address);

	CHECK_EQ(try_open(fd, ""), 0);
	return fd;
}

static void close_all(const int *fds)
{
	for (unsigned i = 0; i < PLACES; i++)
		close(fds[i]);
	WAIT_FOR(server_stats().connections == 0);
}

/* The last one is another host's, in the place that was refused to the first. */
static void one_host(const char *const *addresses, const char *other)
{
	int fds[PLACES];

	for (unsigned i = 0; i < PLACES - 1; i++)
		fds[i] = opened_from(addresses[i]);
	CHECK_EQ(server_stats().connections_refused, 0);
	hear_close(add_from(addresses[0]));
	CHECK_EQ(server_stats().connections_refused, 1);
	fds[PLACES - 1] = opened_from(other);
	CHECK_EQ(server_stats().connections_refused, 1);
	close_all(fds);
}

SERVED_TEST(test_an_ipv6_host_counts_by_its_network)
{
	const char *addresses[PLACES];
	char texts[PLACES][32];

	for (unsigned i = 0; i < PLACES; i++) {
		snprintf(texts[i], sizeof(texts[i]), "fd00::1:%x", i);
		addresses[i] = texts[i];
	}
	one_host(addresses, "fd00:0:0:1::1");
}

SERVED_TEST(test_loopback_is_one_host)
{
	const char *addresses[PLACES];
	char texts[PLACES][32];

	for (unsigned i = 0; i < PLACES; i++) {
		snprintf(texts[i], sizeof(texts[i]), "::ffff:127.0.%u.1", i);
		addresses[i] = i % 2 != 0 ? "::1" : texts[i];
	}
	one_host(addresses, "::ffff:128.0.0.1");
}

SERVED_TEST(test_hosts_of_ipv4_count_apart)
{
	int fds[PLACES];
	char address[32];

	for (unsigned i = 0; i < PLACES; i++) {
		snprintf(address, sizeof(address), "::ffff:10.0.0.%u", i);
		fds[i] = opened_from(address);
	}
	CHECK_EQ(server_stats().connections_refused, 0);
	close_all(fds);
}

int main(void)
{
	run_tests();
	lone_threads_max = 2;
	return run_tests();
}
