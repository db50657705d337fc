// SPDX-License-Identifier: Apache-2.0
/* The server's handshake: what clients may say, and what happens to those who say other things. */
#include "nbd_memory_fixture.h"

#define CONNECTIONS 4u

static const struct iswi_nbd_backend listed_backend = {
	.listed = "disk",
	.open = test_open,
	.close = test_close,
	.hold = test_hold,
	.release = test_release,
};

static void set_up(const struct iswi_nbd_backend *backend, uint32_t handshake_ms)
{
	set_up_with(&(struct iswi_nbd_server_config){
		.backend = backend,
		.connections_max = CONNECTIONS,
		.handshake_ms_max = handshake_ms,
		.send_ms_max = WAIT_S * 1000,
	});
}

#define SECRET_TEST(name) BETWEEN_TEST(name, set_up(&secret_backend, WAIT_S * 1000), tear_down())

static int greeted(void)
{
	int fd = dial(port);

	greet(fd, NBD_FLAG_FIXED_NEWSTYLE | NBD_FLAG_NO_ZEROES);
	return fd;
}

/* Past GO. */
static int opened(void)
{
	int fd = greeted();

	CHECK_EQ(ask_export(fd, NBD_OPT_GO, "disk", NULL), NBD_REP_ACK);
	return fd;
}

/* The server ends the connection, which is then the broken one of that number. */
static void ends_badly(int fd, uint64_t errors)
{
	await_close(fd);
	WAIT_FOR(server_stats().protocol_errors == errors);
}

/* The connection still works: whatever came before was answered and is over. */
static void still_opens(int fd)
{
	char page[4096];

	CHECK_EQ(ask_export(fd, NBD_OPT_GO, "disk", NULL), NBD_REP_ACK);
	CHECK_EQ(do_read(fd, 0, page, sizeof(page)), 0);
	close(fd);
}

SECRET_TEST(test_info_describes)
{
	struct described described = {0};
	int fd = greeted();

	CHECK_EQ(ask_export(fd, NBD_OPT_INFO, "disk", &described), NBD_REP_ACK);
	CHECK_EQ(described.size, EXPORT_BYTES);
	CHECK_EQ(described.flags, NBD_FLAG_HAS_FLAGS | NBD_FLAG_SEND_FLUSH | NBD_FLAG_SEND_FUA |
					  NBD_FLAG_SEND_TRIM | NBD_FLAG_SEND_WRITE_ZEROES |
					  NBD_FLAG_CAN_MULTI_CONN);
	CHECK_EQ(described.block_min, 512);
	CHECK_EQ(described.block_preferred, 4096);
	CHECK_EQ(described.block_max, BLOCK_MAX);
	CHECK_EQ(ask_export(fd, NBD_OPT_INFO, "other", NULL), NBD_REP_ERR_UNKNOWN);
	still_opens(fd);
}

TEST_CASES(test_list, 2, is_listed)
{
	const char *listed = is_listed ? "disk" : NULL;
	char name[64];
	uint32_t bytes;
	int fd;

	set_up(is_listed ? &listed_backend : &secret_backend, WAIT_S * 1000);
	fd = greeted();
	CHECK(say_option(fd, NBD_OPT_LIST, NULL, 0));
	if (listed != NULL) {
		CHECK_EQ(hear_option(fd, NBD_OPT_LIST, name, sizeof(name), &bytes), NBD_REP_SERVER);
		CHECK_EQ(bytes, 4 + strlen(listed));
		CHECK_EQ(nbd_get32(name), strlen(listed));
		CHECK(memcmp(name + 4, listed, strlen(listed)) == 0);
	}
	CHECK_EQ(hear_option(fd, NBD_OPT_LIST, NULL, 0, NULL), NBD_REP_ACK);
	CHECK(say_option(fd, NBD_OPT_LIST, "x", 1));
	CHECK_EQ(hear_option(fd, NBD_OPT_LIST, NULL, 0, NULL), NBD_REP_ERR_INVALID);
	still_opens(fd);
	tear_down();
}

/*
 * Unknown ones are skipped. Those that are known and not offered never have a payload: with one
 * they are wrong.
 */
SECRET_TEST(test_options_that_are_not_offered)
{
	static const struct {
		uint32_t option;
		bool known;
	} options[] = {
		{0, false},
		{NBD_OPT_SET_META_CONTEXT, false},
		{12345, false},
		{NBD_OPT_LIST_META_CONTEXT, false},
		{UINT32_MAX, false},
		{NBD_OPT_STARTTLS, true},
		{NBD_OPT_STRUCTURED_REPLY, true},
		{NBD_OPT_EXTENDED_HEADERS, true},
	};
	static const char payload[ISWI_NBD_OPTION_BYTES_MAX];
	static const uint32_t sizes[] = {0, 1, sizeof(payload)};
	int fd = greeted();

	for (unsigned i = 0; i < ISWI_ARRAY_LEN(options); i++)
		for (unsigned k = 0; k < ISWI_ARRAY_LEN(sizes); k++) {
			CHECK(say_option(fd, options[i].option, payload, sizes[k]));
			CHECK_EQ(hear_option(fd, options[i].option, NULL, 0, NULL),
				 options[i].known && sizes[k] > 0 ? NBD_REP_ERR_INVALID
								  : NBD_REP_ERR_UNSUP);
		}
	still_opens(fd);
}

/* nbd-client is one: it goes by its command line. */
SECRET_TEST(test_who_does_not_ask_for_block_sizes_is_let_in)
{
	static const uint32_t options[] = {NBD_OPT_INFO, NBD_OPT_GO};
	unsigned char data[64] = {0}, page[4096];
	uint32_t bytes;
	int fd = greeted();

	for (unsigned i = 0; i < ISWI_ARRAY_LEN(options); i++) {
		unsigned told = 0;
		uint32_t type;

		memset(data, 0, sizeof(data));
		nbd_put32(data, 4);
		memcpy(data + 4, "disk", 4);
		CHECK(say_option(fd, options[i], data, 10));
		while ((type = hear_option(fd, options[i], data, sizeof(data), &bytes)) ==
		       NBD_REP_INFO) {
			if (nbd_get16(data) != NBD_INFO_BLOCK_SIZE)
				continue;
			CHECK_EQ(nbd_get32(data + 2), 512);
			told++;
		}
		CHECK_EQ(type, NBD_REP_ACK);
		CHECK_EQ(told, 1);
	}
	CHECK_EQ(do_read(fd, 0, page, 100), NBD_EINVAL);
	CHECK_EQ(do_read(fd, 512, page, 1024), 0);
	close(fd);
}

/* Lengths that contradict each other. */
SECRET_TEST(test_malformed_go)
{
	static const struct {
		uint32_t bytes, name_bytes;
		uint16_t infos;
	} cases[] = {{0, 0, 0},  {5, 0, 0},           {6, 1, 0},     {10, 4, 1},
		     {14, 4, 1}, {10, UINT32_MAX, 0}, {6, 0, 65535}, {8192, 5000, 0}};
	static unsigned char data[8192];
	int fd = greeted();

	for (unsigned i = 0; i < ISWI_ARRAY_LEN(cases); i++) {
		memset(data, 0, sizeof(data));
		nbd_put32(data, cases[i].name_bytes);
		memcpy(data + 4, "disk", 4);
		nbd_put16(data + (cases[i].name_bytes == 4 ? 8 : 4), cases[i].infos);
		CHECK(say_option(fd, NBD_OPT_GO, data, cases[i].bytes));
		CHECK_EQ(hear_option(fd, NBD_OPT_GO, NULL, 0, NULL), NBD_REP_ERR_INVALID);
	}
	still_opens(fd);
}

SECRET_TEST(test_export_name)
{
	unsigned char reply[10 + 124];
	char page[4096];
	int fd;

	for (uint32_t no_zeroes = 0; no_zeroes <= NBD_FLAG_NO_ZEROES;
	     no_zeroes += NBD_FLAG_NO_ZEROES) {
		fd = dial(port);
		greet(fd, NBD_FLAG_FIXED_NEWSTYLE | no_zeroes);
		CHECK(say_option(fd, NBD_OPT_EXPORT_NAME, "disk", 4));
		CHECK(hear(fd, reply, no_zeroes != 0 ? 10 : sizeof(reply)));
		CHECK_EQ(nbd_get64(reply), EXPORT_BYTES);
		CHECK_EQ(do_read(fd, 4096, page, sizeof(page)), 0);
		close(fd);
	}
	fd = greeted();
	CHECK(say_option(fd, NBD_OPT_EXPORT_NAME, "nope", 4));
	await_close(fd);
}

SECRET_TEST(test_abort)
{
	int fd = greeted();

	CHECK(say_option(fd, NBD_OPT_ABORT, NULL, 0));
	CHECK_EQ(hear_option(fd, NBD_OPT_ABORT, NULL, 0, NULL), NBD_REP_ACK);
	await_close(fd);
	WAIT_FOR(server_stats().connections == 0);
	CHECK_EQ(server_stats().protocol_errors, 0);
}

SECRET_TEST(test_protocol_errors)
{
	unsigned char head[NBD_OPTION_HEADER_BYTES];
	int fd = dial(port);

	greet(fd, 0x80000003u); /* a flag nobody knows */
	ends_badly(fd, 1);

	fd = greeted();
	nbd_put_option(head, NBD_OPT_LIST, 0);
	head[3] ^= 1;
	CHECK(say(fd, head, sizeof(head)));
	ends_badly(fd, 2);

	fd = greeted();
	nbd_put_option(head, NBD_OPT_GO, ISWI_NBD_OPTION_BYTES_MAX + 1);
	CHECK(say(fd, head, sizeof(head)));
	ends_badly(fd, 3);

	fd = greeted();
	for (unsigned i = 0; i < ISWI_NBD_OPTIONS_MAX; i++) {
		CHECK(say_option(fd, NBD_OPT_INFO, NULL, 0));
		CHECK_EQ(hear_option(fd, NBD_OPT_INFO, NULL, 0, NULL), NBD_REP_ERR_INVALID);
	}
	say_option(fd, NBD_OPT_INFO, NULL, 0);
	ends_badly(fd, 4);
	WAIT_FOR(server_stats().connections == 0);
	CHECK_EQ(server_stats().protocol_errors, 4);
	still_opens(greeted());
}

SECRET_TEST(test_silent_connections_keep_nobody_out)
{
	int fds[2 * CONNECTIONS];

	still_opens(greeted());
	WAIT_FOR(server_stats().connections == 0);
	for (unsigned i = 0; i < 2 * CONNECTIONS; i++)
		fds[i] = greeted();
	CHECK_EQ(server_stats().connections, CONNECTIONS);
	CHECK_EQ(server_stats().connections_refused, CONNECTIONS);
	still_opens(greeted());
	CHECK_EQ(server_stats().protocol_errors, 0);
	for (unsigned i = 0; i <= CONNECTIONS; i++)
		await_close(fds[i]);
	for (unsigned i = CONNECTIONS + 1; i < 2 * CONNECTIONS; i++)
		close(fds[i]);
}

SECRET_TEST(test_connection_limit)
{
	int fds[CONNECTIONS];

	for (unsigned i = 0; i < CONNECTIONS; i++)
		fds[i] = opened();
	await_close(dial(port));
	CHECK_EQ(server_stats().connections_refused, 1);
	close(fds[0]);
	WAIT_FOR(server_stats().connections == CONNECTIONS - 1);
	still_opens(greeted());
	for (unsigned i = 1; i < CONNECTIONS; i++)
		close(fds[i]);
}

/* A client that never gets to GO does not keep its place. One that did may be idle. */
BETWEEN_TEST(test_handshake_deadline, set_up(&secret_backend, 500), tear_down())
{
	char page[4096];
	int idle = opened(), silent = dial(port), drip = greeted();

	/* Bytes that lead nowhere do not buy time. */
	for (unsigned i = 0; server_stats().connections > 1; i++) {
		CHECK(i < WAIT_S * 50);
		send(drip, "I", 1, MSG_NOSIGNAL);
		sleep_ms(20);
	}
	hear_close(silent);
	CHECK_EQ(server_stats().protocol_errors, 2);
	CHECK_EQ(do_read(idle, 0, page, sizeof(page)), 0);
	close(silent);
	close(drip);
	close(idle);
}

/* The end of the server does not wait for clients, wherever they are. */
TEST(test_destroy_with_clients)
{
	int fds[3];

	set_up(&secret_backend, WAIT_S * 1000);
	fds[0] = greeted();
	fds[1] = opened();
	fds[2] = opened();
	CHECK(say_request(fds[2], NBD_CMD_WRITE, 0, 1, 0, 4096)); /* half of it */
	tear_down();
	for (unsigned i = 0; i < ISWI_ARRAY_LEN(fds); i++) {
		await_close(fds[i]);
	}
}
